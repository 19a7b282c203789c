import { inThread } from "../grammar/in-thread.js";
import { type FromGrammars, GRAMMARS, type GrammarPort, type ToGrammars } from "../grammar/words.js";
import type { WorkerScope } from "../protocol/ports.js";
import { trusted } from "../protocol/trusted.js";
import type { SharePort } from "../shared/share.js";
import { type Host, isFirefox, THREAD, type ThreadPort, type ThreadTask, type ThreadWord } from "./host.js";
import { hosted } from "./hosted.js";
import { follow } from "./parts/follow.js";
import { parts } from "./parts/index.js";
import { serve } from "./session/serve.js";
import { work } from "./wasm/thread.js";

/**
 * The worker's entry. Its name says whether it is the engine's worker, one of its threads, or the worker that
 * follows grammars; a SharedWorker also begins here.
 */

/** A part of the worker's global, whose types cannot be loaded together with the window's. */
interface Scope extends WorkerScope {
  readonly name?: string;
  readonly location?: { readonly href: string };
  importScripts?(...urls: string[]): void;
  close(): void;
}

const scope = globalThis as unknown as Scope;

if (scope.name === THREAD) beThread();
else if (scope.name === GRAMMARS) beGrammars();
else if ("onconnect" in scope) beShared();
else serve(scope, host(), parts);

function host(): Host {
  return {
    spawn: sharesMemory() ? spawn : null,
    grammars: typeof Worker === "function" ? grammars : async () => follow,
    hardwareThreads: hardwareThreads(),
  };
}

function hardwareThreads(): number {
  return (globalThis.navigator as Navigator | undefined)?.hardwareConcurrency ?? 1;
}

/** Whether other workers can have the memory of this one. */
function sharesMemory(): boolean {
  return globalThis.crossOriginIsolated === true && typeof Worker === "function";
}

/**
 * Starts this file again as another worker: the file exists, wherever a bundler has put it and whatever the
 * page's policy is.
 */
function again(name: string): Worker {
  const here = scope.location?.href ?? "";
  return trusted(() => new Worker(here, { type: kind(), name }));
}

/**
 * The type of worker that this file has become: bundlers make classic scripts of workers, or leave them
 * modules. In a module importScripts throws a TypeError. Firefox does so only if an address is given, for
 * which a script throws another error.
 */
function kind(): WorkerType {
  try {
    scope.importScripts?.();
    // In other browsers, a page that enforces Trusted Types would reject the address.
    if (isFirefox()) scope.importScripts?.("http://");
  } catch (error) {
    if (error instanceof TypeError) return "module";
  }
  return "classic";
}

/** Reports a worker that fails. Without preventDefault this worker would fail with it. */
function onFailure(worker: Worker, tell: (message: string) => void): void {
  worker.addEventListener("error", (event) => {
    event.preventDefault();
    tell(event.message || "its worker did not start");
  });
}

function spawn(): ThreadPort {
  const worker = again(THREAD);
  return {
    start: (task) => worker.postMessage(task),
    listen: (onWord) => {
      worker.addEventListener("message", ({ data }: MessageEvent<ThreadWord>) => onWord(data));
      onFailure(worker, (message) => onWord({ type: "failed", message }));
    },
    end: () => worker.terminate(),
  };
}

function grammars(): GrammarPort {
  const worker = again(GRAMMARS);
  return {
    post: (word) => worker.postMessage(word),
    listen: (onWord) => {
      worker.addEventListener("message", ({ data }: MessageEvent<FromGrammars>) => onWord(data));
      onFailure(worker, (message) => onWord({ type: "failed", message, code: "unsupported" }));
    },
    end: () => worker.terminate(),
  };
}

/** The worker's end of a connection that receives `In` and sends `Out`. */
interface End<In, Out> {
  addEventListener(type: "message", listener: (event: { readonly data: In }) => void): void;
  postMessage(word: Out): void;
}

function beGrammars(): void {
  const { addEventListener, postMessage } = globalThis as unknown as End<ToGrammars, FromGrammars>;
  const following = inThread(Promise.resolve(follow));
  following.listen((word) => postMessage(word));
  addEventListener("message", ({ data }) => following.post(data));
}

/** Serves a SharedWorker's pages. */
function beShared(): void {
  const { addEventListener } = globalThis as unknown as {
    addEventListener(type: "connect", listener: (event: { readonly ports: [SharePort] }) => void): void;
  };
  const share = hosted(host());
  addEventListener("connect", ({ ports: [port] }) => share.connect(port));
}

function beThread(): void {
  const { addEventListener, postMessage } = globalThis as unknown as End<ThreadTask, ThreadWord>;
  addEventListener("message", ({ data }) => {
    work(data, (word) => postMessage(word));
    scope.close();
  });
}
