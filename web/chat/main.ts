/** The chat page: loads the model, then answers messages that are typed, or filled in by a link. */

import { openCloudSettings } from "./cloud-settings.js";
import { showContext } from "./context-meter.js";
import { type AnswerView, Conversation } from "./conversation.js";
import { element, isFocusLost, setState } from "./dom.js";
import { keepDraft } from "./draft.js";
import { formatCount, formatRate, formatSeconds } from "./format.js";
import { History } from "./history.js";
import { openKeptModel } from "./kept-model.js";
import { type Link, parseLink } from "./link.js";
import { Loading } from "./loading.js";
import { openMenu } from "./menu.js";
import { Model, readArtifacts } from "./model.js";
import { showDevice, showModel, showProgram } from "./model-card.js";
import { explain, hideNotice, showNotice } from "./notice.js";
import { readOffer } from "./offer.js";
import { keepForOffline } from "./offline.js";
import { openPicker } from "./picker.js";
import { offerFormats, offerTools, openSettings, readSettings, type Settings } from "./settings.js";
import { limitTools } from "./tools-fit.js";
import { type Help, insecureHelp, webgpuHelp } from "./webgpu-help.js";
import type { Listener, Outcome } from "./written.js";

const prompt = element("prompt", HTMLTextAreaElement);
const send = element("send", HTMLButtonElement);
const stop = element("stop", HTMLButtonElement);
const newChat = element("new-chat", HTMLButtonElement);
const stats = element("stats", HTMLOutputElement);
const welcome = element("welcome", HTMLParagraphElement);

const model = new Model();
const loading = new Loading(() => (running !== null ? "answering" : isReady ? "ready" : "loading"));
const history = new History(
  (chat) => (chat ? showChat(() => conversation.open(chat)) : showChat(() => conversation.clear())),
  () => running !== null,
);
const draft = keepDraft(prompt);
const conversation = new Conversation({
  changed: (chat) => history.keep(chat),
  asked: () => void answer(null),
});
/** Milliseconds between two saves of an answer that is being written. */
const KEEP_EVERY = 1000;
/** Whether the device or the cloud can answer. */
let isReady = false;
/** Set while an answer is being written. */
let running: AbortController | null = null;

async function start(): Promise<void> {
  const link = parseLink(location.search);
  openSettings(link);
  await openCloudSettings((settings) => {
    model.setCloud(settings);
    offerAbilities();
  });
  const kept = await history.restore();
  if (kept) conversation.open(kept);
  // Checked first: on an insecure address the artifact cannot even be read, nor a cloud called.
  const insecure = insecureHelp();
  if (insecure) {
    showUnable(insecure);
    return;
  }
  const { artifact, models } = await readOffer();
  openPicker(models, artifact);
  const artifacts = await readArtifacts(artifact);
  const [first] = artifacts.values();
  if (first) showModel(first.manifest);
  // What runs in WebAssembly needs no GPU.
  const help = artifacts.has("wasm") ? null : await webgpuHelp();
  if (help && model.canLeave) {
    showDevice("the cloud: this browser offers no GPU");
    ready(link, "This browser cannot run the model, so the cloud answers.");
    return;
  }
  if (help) {
    showUnable(help);
    return;
  }
  loading.show({ phase: "weights", loaded: 0, cached: 0, total: first?.manifest.weights.bytes ?? 0 });
  const engine = await model.load(artifact, (progress) => loading.show(progress));
  const { backend, program, choice, precision, adapter } = engine.model;
  showDevice(`${precision} on ${adapter}`);
  showProgram(program, choice);
  ready(link, "The model is ready.");
  void showContext(engine, conversation);
  limitTools(engine, () => model.canLeave);
  await openKeptModel(artifact);
  const runs = artifacts.get(backend.name);
  if (runs) await keepForOffline(runs);
}

/** Shows that nothing can answer, and what would help. */
function showUnable(help: Help): void {
  showNotice(help);
  loading.hide();
  setState("error", help.title);
}

/** Offers the settings that the device or the cloud supports. */
function offerAbilities(): void {
  offerFormats(model.canFormat);
  offerTools(model.canCall);
}

function ready(link: Link, greeting: string): void {
  isReady = true;
  loading.hide();
  offerAbilities();
  const next =
    link.prompt === null
      ? "Write a message to begin."
      : "The link has filled in a message: Send asks for an answer.";
  welcome.textContent = `${greeting} ${next}`;
  welcome.hidden = !conversation.isEmpty;
  send.disabled = false;
  newChat.disabled = false;
  setState("idle", "The model is ready");
  // A link only fills in the message, a person sends it: any site can open this page with a link, and an
  // answer may cost the person's key.
  if (!draft.restore() && link.prompt !== null) prompt.value = link.prompt;
  if (isFocusLost()) prompt.focus();
}

/** Shows another chat, or a new one. */
function showChat(open: () => void): void {
  open();
  hideNotice();
  stats.textContent = "";
  welcome.hidden = !isReady || !conversation.isEmpty;
  if (!isReady) return;
  setState("idle", conversation.isEmpty ? "New chat" : "The chat is open");
  prompt.focus();
  if (model.engine) void showContext(model.engine, conversation);
}

/** Answers a message, or the last question of the chat (null). */
async function answer(text: string | null): Promise<void> {
  if (!isReady || running !== null) return;
  hideNotice();
  let settings: Settings;
  try {
    settings = readSettings();
  } catch (error) {
    // No request was made yet: the message stays in its box.
    fail(error);
    return;
  }
  if (text !== null) {
    prompt.value = "";
    draft.forget();
  }
  welcome.hidden = true;
  stats.textContent = "Reading the prompt";
  const controller = new AbortController();
  running = controller;
  showRunning(true);
  setState("generating", "Writing an answer");
  try {
    const { raw, format, tools } = settings;
    const plain = raw && text !== null;
    if (plain) conversation.clear();
    if (text !== null && (text !== "" || !plain)) conversation.ask(text);
    const system = settings.system === "" ? [] : [{ role: "system" as const, content: settings.system }];
    const messages = [...system, ...conversation.messages(model.canCall)];
    const request = plain ? { prompt: text } : { messages, conversation: conversation.id, format, tools };
    const written = conversation.answer(model.name, {
      ...(plain && { plain }),
      ...(format && { json: true }),
    });
    try {
      const outcome = await model.answer(request, settings.sampling, firstClears(written), controller.signal);
      stats.textContent = "";
      written.end(noteOf(outcome));
      showStats(outcome);
      setState("done", `${outcome.reason === "aborted" ? "Stopped. " : ""}${written.spoken}`);
    } catch (error) {
      written.fail();
      throw error;
    }
  } catch (error) {
    fail(error);
  } finally {
    running = null;
    showRunning(false);
    conversation.showActions();
    if (model.engine) void showContext(model.engine, conversation);
  }
}

/** Removes the note that the prompt is being read, with the first text of the answer. */
function firstClears(written: AnswerView): Listener {
  let begun = false;
  return {
    // Without a cloud there is only one place to show.
    route: (info, name) => written.route(model.hasCloud ? info : null, name),
    called: (calls) => written.called(calls),
    append: (text) => {
      if (!begun && text !== "") {
        begun = true;
        stats.textContent = "";
      }
      written.append(text);
    },
  };
}

function noteOf(outcome: Outcome): string | null {
  if (outcome.reason === "aborted") return "Stopped";
  return outcome.reason === "length"
    ? `Ended after ${formatCount(outcome.tokens)} tokens, the most allowed`
    : null;
}

function showStats({ tokens, ttft, rate }: Outcome): void {
  if (tokens === 0) return;
  const parts = [`${formatCount(tokens)} ${tokens === 1 ? "token" : "tokens"}`];
  if (rate !== null) parts.push(formatRate(rate));
  if (ttft !== null) parts.push(`first token after ${formatSeconds(ttft)}`);
  stats.textContent = parts.join(" · ");
}

function showRunning(on: boolean): void {
  send.hidden = on;
  stop.hidden = !on;
  newChat.disabled = on;
  // The pressed button is gone; move the focus only if it was there.
  if (isFocusLost()) (on ? stop : prompt).focus();
}

function fail(error: unknown): void {
  stats.textContent = "";
  const help = explain(error, !model.hasCloud);
  loading.hide();
  // Without a model nothing works, so offer a reload; with one, the next message is the way on.
  showNotice(help, isReady ? null : { label: "Try again", run: () => location.reload() });
  setState("error", help.title);
}

element("composer", HTMLFormElement).addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value;
  // With raw, an empty prompt is allowed, too.
  if (text.trim() !== "" || element("raw", HTMLInputElement).checked) void answer(text);
});

prompt.addEventListener("keydown", (event) => {
  // A message of few lines has no pages of its own.
  const pages = { PageUp: -1, PageDown: 1 }[event.key];
  if (pages !== undefined && prompt.scrollHeight <= prompt.clientHeight) {
    event.preventDefault();
    conversation.page(pages);
  }
  // Enter that ends an input method's composition chooses a character and sends nothing.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send.form?.requestSubmit();
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});

stop.addEventListener("click", () => running?.abort());
for (const form of ["settings-form", "cloud-form"])
  element(form, HTMLFormElement).addEventListener("submit", (event) => event.preventDefault());

newChat.addEventListener("click", () => {
  history.opened(null);
  showChat(() => conversation.clear());
  void history.refresh();
});

// Saves the answer that is being written, so that a reload loses nothing of it.
addEventListener("pagehide", () => {
  const { partial } = conversation;
  if (partial) history.keepForReload(partial);
});
setInterval(() => {
  const { partial } = conversation;
  if (partial) history.keep(partial);
}, KEEP_EVERY);

openMenu();
start().catch(fail);
