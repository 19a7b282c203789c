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
import { Waiting, type What } from "./waiting.js";
import { type Help, insecureHelp, webgpuHelp } from "./webgpu-help.js";
import type { Listener, Outcome } from "./written.js";

const prompt = element("prompt", HTMLTextAreaElement);
const send = element("send", HTMLButtonElement);
const stop = element("stop", HTMLButtonElement);
const newChat = element("new-chat", HTMLButtonElement);
const stats = element("stats", HTMLOutputElement);
const welcome = element("welcome", HTMLParagraphElement);

const model = new Model();
const loading = new Loading(() => (running !== null ? "answering" : state === "ready" ? "ready" : "loading"));
const history = new History(
  (chat) => (chat ? showChat(() => conversation.open(chat)) : showChat(() => conversation.clear())),
  () => running !== null,
);
const draft = keepDraft(prompt);
const conversation = new Conversation({
  changed: (chat) => history.keep(chat),
  asked: () => void answer(null),
  refused: () => waiting.tell("An answer is being written. Stop it, or ask again when it is complete."),
});
const waiting = new Waiting();
/** Milliseconds between two saves of an answer that is being written. */
const KEEP_EVERY = 1000;
/** Whether the device or the cloud can answer; "loading" until that is known. */
let state: "loading" | "ready" | "unable" = "loading";
/** Set while an answer is being written. */
let running: AbortController | null = null;

async function start(): Promise<void> {
  const link = parseLink(location.search);
  openSettings(link);
  // A link only fills in the message, a person sends it: any site can open this page with a link, and an
  // answer may cost the person's key.
  if (prompt.value === "" && !draft.restore() && link.prompt !== null) prompt.value = link.prompt;
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
  becomeUnable();
  showNotice(help);
  loading.hide();
  setState("error", help.title);
}

/** Nothing can answer: what waits goes back to the person. */
function becomeUnable(): void {
  state = "unable";
  send.disabled = true;
  stopWaiting();
}

/** Offers the settings that the device or the cloud supports. */
function offerAbilities(): void {
  offerFormats(model.canFormat);
  offerTools(model.canCall);
}

function ready(link: Link, greeting: string): void {
  state = "ready";
  loading.hide();
  offerAbilities();
  const next =
    link.prompt === null
      ? "Write a message to begin."
      : "The link has filled in a message: Send asks for an answer.";
  welcome.textContent = `${greeting} ${next}`;
  welcome.hidden = !conversation.isEmpty;
  newChat.disabled = false;
  setState("idle", "The model is ready");
  if (isFocusLost()) prompt.focus();
  sendWaiting();
}

/** Shows another chat, or a new one. */
function showChat(open: () => void): void {
  open();
  hideNotice();
  stats.textContent = "";
  if (waiting.what === "question") stopWaiting();
  welcome.hidden = state !== "ready" || !conversation.isEmpty;
  if (state !== "ready") return;
  setState("idle", conversation.isEmpty ? "New chat" : "The chat is open");
  prompt.focus();
  if (model.engine) void showContext(model.engine, conversation);
}

/** Answers a message, or the last question of the chat (null). */
async function answer(text: string | null): Promise<void> {
  if (state !== "ready" || running !== null) {
    wait(text === null ? "question" : "message");
    return;
  }
  waiting.end();
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
    sendWaiting();
  }
}

/** Lets a message or a question wait until it can be answered, and says so. */
function wait(what: What): void {
  if (state === "unable") {
    waiting.tell("No model can answer here. The note above says why.");
    return;
  }
  waiting.begin(what, running === null ? "loading" : "answering");
  if (running !== null) return;
  showRunning(true);
  conversation.showActions();
}

/** Nothing waits any more. A message stays in its box. */
function stopWaiting(): void {
  if (waiting.end() !== null && running === null) showRunning(false);
}

/** Sends what waits. */
function sendWaiting(): void {
  const what = waiting.what;
  stopWaiting();
  if (what === "message") send.form?.requestSubmit();
  else if (what === "question") void answer(null);
}

/** Stops the answer that is being written, and what waits for it or for the model. */
function stopAll(): void {
  stopWaiting();
  running?.abort();
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
  newChat.disabled = on || state !== "ready";
  // The pressed button is gone; move the focus only if it was there.
  if (isFocusLost()) (on ? stop : prompt).focus();
}

function fail(error: unknown): void {
  stats.textContent = "";
  // Without a model nothing works, so offer a reload; with one, the next message is the way on.
  if (state === "ready") stopWaiting();
  else becomeUnable();
  const help = explain(error, !model.hasCloud);
  loading.hide();
  showNotice(help, state === "ready" ? null : { label: "Try again", run: () => location.reload() });
  setState("error", help.title);
}

element("composer", HTMLFormElement).addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value;
  // With raw, an empty prompt is allowed, too.
  if (text.trim() !== "" || element("raw", HTMLInputElement).checked) void answer(text);
});

prompt.addEventListener("input", () => {
  if (waiting.what === "message" && prompt.value === "") stopWaiting();
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
  if (event.key === "Escape") stopAll();
});

stop.addEventListener("click", stopAll);
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
// Disabled until here: without this script the form would reload the page.
send.disabled = false;
start().catch(fail);
