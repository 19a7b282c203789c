import type { Follow } from "../grammar/in-thread.js";
import type { GrammarPort } from "../grammar/words.js";
import type { Fetch } from "../storage/http.js";

/** By this name a worker of this package knows that it is to be a thread. */
export const THREAD = "nearfar-thread";

export function isFirefox(): boolean {
  return /Firefox/.test(globalThis.navigator?.userAgent ?? "");
}

/** Another worker, or what follows grammars in this thread. */
export type StartGrammars = () => GrammarPort | Promise<Follow>;

/** All that a thread needs; its only message. */
export interface ThreadTask {
  readonly module: WebAssembly.Module;
  readonly memory: WebAssembly.Memory;
  readonly pool: number;
  /** The end of its stack. */
  readonly stack: number;
}

/** `failed`: it is gone, and with it what it computed. */
export type ThreadWord = { readonly type: "ready" } | { readonly type: "failed"; readonly message: string };

/** The host's end of the line to a thread. */
export interface ThreadPort {
  start(task: ThreadTask): void;
  /** Listens to the thread; a thread that does not start is told as well. */
  listen(onWord: (word: ThreadWord) => void): void;
  end(): void;
}

/** What the worker's code is given by the place that it runs in: a browser, Node, Deno, Bun. */
export interface Host {
  /** How files are read; the global `fetch` where it is left out. */
  readonly fetch?: Fetch | undefined;
  /** Starts a thread over shared memory; null where none can be had. */
  readonly spawn: (() => ThreadPort) | null;
  /** Starts a worker that follows grammars, or loads what does so in this thread; null where neither can be. */
  readonly grammars: StartGrammars | null;
  /** As many threads as the processor runs at once. */
  readonly hardwareThreads: number;
}
