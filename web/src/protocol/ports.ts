/** The two ends of the connection between a page and its worker. */

import type { FromWorker, ToWorker } from "./messages.js";

/** The part of a Worker that an engine uses. */
export interface WorkerPort {
  postMessage(message: ToWorker): void;
  addEventListener(type: "message", listener: (event: { readonly data: FromWorker }) => void): void;
  addEventListener(type: "error", listener: (event: { readonly message: string }) => void): void;
  /** Ends the worker. Node's and Deno's workers return a promise for the end. */
  terminate(): unknown;
}

/** Starts the worker of an engine; the engine owns the worker from then on. */
export type StartWorker = (signal: AbortSignal | undefined) => WorkerPort | Promise<WorkerPort>;

/** The worker's end of the connection to the page. */
export interface WorkerScope {
  postMessage(message: FromWorker): void;
  addEventListener(type: "message", listener: (event: { readonly data: ToWorker }) => void): void;
}
