import { DeviceError, type ErrorRecord, toErrorRecord } from "../both/errors.js";
import type { AnswerEvent, FromWorker, LoadProgress, Prompt, ToWorker } from "../both/messages.js";
import { Session } from "./session.js";

/** The dedicated worker's entry: loads one model and answers until it is disposed. */

/** A message for each chunk of a download would keep the page busy. */
const PROGRESS_INTERVAL_MS = 50;

/** Part of the worker's global, whose types cannot be loaded beside those of the window. */
interface WorkerScope {
  postMessage(message: FromWorker): void;
  addEventListener(type: "message", listener: (event: MessageEvent<ToWorker>) => void): void;
}

const scope = globalThis as unknown as WorkerScope;
const loading = new AbortController();
let session: Session | null = null;
let loaded: Promise<void> = Promise.resolve();
let lastProgress = 0;
/** By load: who waits for the page's word on it. */
const askers = new Map<string, (left: boolean) => void>();

scope.addEventListener("message", ({ data }) => handle(data));
scope.postMessage({ type: "started" });

function handle(message: ToWorker): void {
  switch (message.type) {
    case "load":
      loaded = load(message);
      return;
    case "left":
      askers.get(message.load)?.(message.left);
      return;
    case "generate":
      generate(message);
      return;
    case "abort":
      session?.abort(message.id);
      return;
    case "stats":
      if (session) scope.postMessage({ type: "stats", id: message.id, stats: session.stats() });
      return;
    case "count":
      scope.postMessage({ type: "counted", id: message.id, tokens: count(message.prompt) });
      return;
    case "profile":
      void profile(message);
      return;
    case "dispose":
      void dispose();
  }
}

async function load(message: Extract<ToWorker, { type: "load" }>): Promise<void> {
  const { url, settings, load } = message;
  const onWarning = (message: string): void => scope.postMessage({ type: "warning", message });
  try {
    const hooks = { signal: loading.signal, load, hasLeft, onProgress, onWarning };
    session = await Session.load(new URL(url), settings, hooks);
    onProgress({ phase: "ready" });
    scope.postMessage({ type: "loaded", card: session.card() });
  } catch (error) {
    scope.postMessage({ type: "failed", error: toErrorRecord(error) });
  }
}

/** The page knows: workers have no localStorage. */
function hasLeft(load: string): Promise<boolean> {
  return new Promise((resolve) => {
    askers.set(load, resolve);
    scope.postMessage({ type: "whether left", load });
  });
}

function generate({ id, request }: Extract<ToWorker, { type: "generate" }>): void {
  const tell = (answer: AnswerEvent): void => scope.postMessage({ type: "answer", id, answer });
  if (session) session.generate(id, request, tell);
  else tell({ event: "error", error: toErrorRecord(new DeviceError("The model is not loaded.")) });
}

function count(prompt: Prompt): number | ErrorRecord {
  try {
    if (!session) throw new DeviceError("The model is not loaded.");
    return session.count(prompt);
  } catch (error) {
    return toErrorRecord(error);
  }
}

async function profile({ id, options }: Extract<ToWorker, { type: "profile" }>): Promise<void> {
  try {
    if (!session) throw new DeviceError("The model is not loaded.");
    scope.postMessage({ type: "profiled", id, profile: await session.profile(options) });
  } catch (error) {
    scope.postMessage({ type: "profiled", id, profile: toErrorRecord(error) });
  }
}

async function dispose(): Promise<void> {
  loading.abort();
  await loaded;
  session?.dispose();
  scope.postMessage({ type: "disposed", stats: session?.stats() ?? null });
  session = null;
}

function onProgress(progress: LoadProgress): void {
  const now = performance.now();
  const last = progress.phase !== "weights" || progress.loaded === progress.total;
  if (!last && now - lastProgress < PROGRESS_INTERVAL_MS) return;
  lastProgress = now;
  scope.postMessage({ type: "progress", progress });
}
