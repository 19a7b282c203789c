/** The chat page: load the model, then answer, by hand or by link. */

import type { LoadProgress } from "../src/index.js";
import { Conversation } from "./conversation.js";
import { element, setState } from "./dom.js";
import { formatBytes, formatCount, formatRate, formatSeconds } from "./format.js";
import { type Link, parseLink } from "./link.js";
import { type Model, type Outcome, openModel, readManifest } from "./model.js";
import { showDevice, showModel } from "./model-card.js";
import { explain, hideNotice, showNotice } from "./notice.js";
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

let model: Model | null = null;
/** Set while an answer is being written. */
let running: AbortController | null = null;

async function start(): Promise<void> {
  const link = parseLink(location.search);
  applyLink(link);
  const manifest = await readManifest(artifact);
  showModel(manifest);
  const help = await webgpuHelp();
  if (help) {
    showNotice(help);
    loading.hidden = true;
    setState("error", help.title);
    return;
  }
  showProgress({ phase: "weights", loaded: 0, cached: 0, total: manifest.weights.bytes });
  model = await openModel(artifact, showProgress);
  showDevice(model.runsOn);
  ready(link);
}

function showProgress(progress: LoadProgress): void {
  if (progress.phase !== "weights") return;
  const { loaded, cached, total } = progress;
  const whence = cached > 0 ? `, ${formatBytes(cached)} of them kept from the last visit` : "";
  const label = loaded < total ? "Loading the model" : "Preparing the model";
  element("loading-label", HTMLParagraphElement).textContent = label;
  element("loading-bytes", HTMLParagraphElement).textContent =
    `${formatBytes(loaded)} of ${formatBytes(total)}${whence}`;
  element("progress", HTMLProgressElement).value = total > 0 ? loaded / total : 1;
}

function ready(link: Link): void {
  loading.hidden = true;
  welcome.textContent = "The model is ready. Write a message to begin.";
  welcome.hidden = false;
  send.disabled = false;
  newChat.disabled = false;
  setState("idle", "The model is ready");
  if (link.prompt === null) prompt.focus();
  else void answer(link.prompt);
}

async function answer(text: string): Promise<void> {
  if (model === null || running !== null) return;
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
    const request = settings.raw ? { prompt: text } : { messages: [...system, ...conversation.messages] };
    const written = conversation.answer(model.name);
    try {
      const outcome = await model.answer(request, settings.sampling, written.append, controller.signal);
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
  return outcome.reason === "length" ? `Ended after ${formatCount(outcome.tokens)} tokens, the most allowed` : null;
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
  showNotice(help, model === null ? { label: "Try again", run: () => location.reload() } : null);
  setState("error", help.title);
}

element("composer", HTMLFormElement).addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value;
  if (model === null || running !== null || (text.trim() === "" && !readSettings().raw)) return;
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
element("settings-form", HTMLFormElement).addEventListener("submit", (event) => event.preventDefault());

newChat.addEventListener("click", () => {
  conversation.clear();
  hideNotice();
  stats.textContent = "";
  welcome.hidden = false;
  setState("idle", "New chat");
  prompt.focus();
});

start().catch(fail);
