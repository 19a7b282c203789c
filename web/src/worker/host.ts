import type { Fetch } from "../both/http.js";
import type { ThreadPort } from "./wasm/threads.js";

/** What the worker's code is given by the place that it runs in: a browser, Node, Deno, Bun. */
export interface Host {
  /** How files are read; the global `fetch` where it is left out. */
  readonly fetch?: Fetch | undefined;
  /** Starts a thread over shared memory; null where none can be had. */
  readonly spawn: (() => ThreadPort) | null;
  /** As many threads as the processor runs at once. */
  readonly hardwareThreads: number;
}
