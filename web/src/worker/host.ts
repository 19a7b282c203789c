import type { Fetch } from "../storage/http.js";
import type { StartGrammars } from "./session/grammars.js";
import type { ThreadPort } from "./wasm/threads.js";

/** By this name a worker of this package knows that it is to be a thread. */
export const THREAD = "nearfar-thread";

export function isFirefox(): boolean {
  return /Firefox/.test(globalThis.navigator?.userAgent ?? "");
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
