/** The chat page: load the model, then answer what is written by hand, or filled in by a link. */

import type { LoadProgress } from "../src/page/index.js";
import { openCloudSettings } from "./cloud-settings.js";
import { Conversation } from "./conversation.js";
import { element, setState } from "./dom.js";
import { formatBytes, formatCount, formatRate, formatSeconds } from "./format.js";
import { type Link, parseLink } from "./link.js";
import { Model, type Outcome, readArtifacts } from "./model.js";
import { showDevice, showModel, showProgram } from "./model-card.js";
import { explain, hideNotice, showNotice } from "./notice.js";
import { keepForOffline } from "./offline.js";
import { applyLink, readSettings } from "./settings.js";
import { webgpuHelp } from "./webgpu-help.js";

const artifact = new URL("artifact/", location.href);
const conversation = new Conversation();
const prompt = element("prompt", HTMLTextAreaElement);
const send = element("send", HTMLButtonElement);
const stop = element("stop", HTMLButtonElement);
const newChat = element("new-chat", HTMLButtonElement);
const stats = element("stats", HTMLOutputElement);
const welcome = element("welcome", HTMLParagraphElement);
const loading = element("loading", HTMLElement);

const model = new Model(artifact);
/** Somebody can answer. */
let isReady = false;
/** Set while an answer is being written. */
let running: AbortController | null = null;

async function start(): Promise<void> {
  const link = parseLink(location.search);
  applyLink(link);
  await openCloudSettings((settings) => model.setCloud(settings));
  const artifacts = await readArtifacts(artifact);
  const [first] = artifacts.values();
  if (first) showModel(first.manifest);
  // What runs in WebAssembly needs no GPU.
  const help = artifacts.has("wasm") ? null : await webgpuHelp();
  if (help && model.hasCloud) {
    showDevice("the cloud: this browser offers no GPU");
    ready(link, "This browser cannot run the model, so the cloud answers.");
    return;
  }
  if (help) {
    showNotice(help);
    loading.hidden = true;
    setState("error", help.title);
    return;
  }
  showProgress({ phase: "weights", loaded: 0, cached: 0, total: first?.manifest.weights.bytes ?? 0 });
  const { backend, program, choice, precision, adapter } = (await model.load(showProgress)).model;
  showDevice(`${precision} on ${adapter}`);
  showProgram(program, choice);
  ready(link, "The model is ready.");
  const runs = artifacts.get(backend.name);
  if (runs) await keepForOffline(runs, program);
}

function showProgress(progress: LoadProgress): void {
  switch (progress.phase) {
    case "kernels":
      showKernels(progress);
      return;
    case "trying":
      showLoading("Finding out what runs best on this GPU", `Trying ${progress.program}`);
      return;
    case "program":
      showLoading("Preparing the model", "");
      return;
    case "weights":
      showWeights(progress);
      return;
    case "reopening":
      // A model that is ready has nothing else that shows it.
      stats.textContent = "The device is opened anew: loading the model again";
      return;
    case "reopened":
      stats.textContent = "";
  }
}

function showWeights({ loaded, cached, total }: Extract<LoadProgress, { phase: "weights" }>): void {
  const whence = cached > 0 ? `, ${formatBytes(cached)} of them kept from the last visit` : "";
  const text = `${formatBytes(loaded)} of ${formatBytes(total)}${whence}`;
  if (isReady) {
    stats.textContent = `Loading the model again: ${text}`;
    return;
  }
  showLoading(loaded < total ? "Loading the model" : "Preparing the model", text);
  element("progress", HTMLProgressElement).value = total > 0 ? loaded / total : 1;
}

/** While the model loads, and later while an answer waits for a size of its kernels for the first time. */
function showKernels({ compiled, total }: Extract<LoadProgress, { phase: "kernels" }>): void {
  const text = compiled < total ? `Compiling kernels: ${compiled} of ${total}` : "";
  if (running !== null) stats.textContent = text;
  else if (!isReady) element("loading-kernels", HTMLParagraphElement).textContent = text;
}

function showLoading(label: string, details: string): void {
  element("loading-label", HTMLParagraphElement).textContent = label;
  element("loading-bytes", HTMLParagraphElement).textContent = details;
}

function ready(link: Link, greeting: string): void {
  isReady = true;
  loading.hidden = true;
  const next =
    link.prompt === null
      ? "Write a message to begin."
      : "The link has filled in a message: Send asks for an answer.";
  welcome.textContent = `${greeting} ${next}`;
  welcome.hidden = false;
  send.disabled = false;
  newChat.disabled = false;
  setState("idle", "The model is ready");
  // A link writes, a person sends: any site can open this page with a link, and an answer may cost the
  // person's key.
  if (link.prompt !== null) prompt.value = link.prompt;
  prompt.focus();
}

async function answer(text: string): Promise<void> {
  if (!isReady || running !== null) return;
  hideNotice();
  welcome.hidden = true;
  stats.textContent = "";
  const controller = new AbortController();
  running = controller;
  showRunning(true);
  setState("generating", "Writing an answer");
  try {
    const settings = readSettings();
    if (settings.raw) conversation.clear();
    if (text !== "" || !settings.raw) conversation.ask(text);
    const system = settings.system === "" ? [] : [{ role: "system" as const, content: settings.system }];
    const messages = [...system, ...conversation.messages];
    const request = settings.raw ? { prompt: text } : { messages, conversation: conversation.id };
    const written = conversation.answer(model.name);
    try {
      const outcome = await model.answer(request, settings.sampling, written, controller.signal);
      written.end(noteOf(outcome));
      showStats(outcome);
      setState("done", outcome.reason === "aborted" ? "Stopped" : "The answer is complete");
    } catch (error) {
      written.fail();
      throw error;
    }
  } catch (error) {
    fail(error);
  } finally {
    running = null;
    showRunning(false);
  }
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
  if (!on) prompt.focus();
}

function fail(error: unknown): void {
  const help = explain(error);
  loading.hidden = true;
  // Without a model nothing works, so offer to begin again; with one, the next message is the way on.
  showNotice(help, isReady ? null : { label: "Try again", run: () => location.reload() });
  setState("error", help.title);
}

element("composer", HTMLFormElement).addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value;
  if (!isReady || running !== null || (text.trim() === "" && !readSettings().raw)) return;
  prompt.value = "";
  void answer(text);
});

prompt.addEventListener("keydown", (event) => {
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
  conversation.clear();
  hideNotice();
  stats.textContent = "";
  welcome.hidden = false;
  setState("idle", "New chat");
  prompt.focus();
});

start().catch(fail);
