/**
 * nearfar in Node, Deno and Bun: `createEngine(folder)` loads an artifact for WebAssembly from the disk or
 * from a server, and offers OpenAI's interface, as in the browser.
 */

import { resolve, sep } from "node:path";
import { pathToFileURL } from "node:url";
import { Worker } from "node:worker_threads";
import { modelUrl } from "../artifact/places.js";
import { type Engine, openEngine } from "../page/client.js";
import type { EngineOptions } from "../page/options.js";
import { throwIfAborted } from "../protocol/errors.js";
import type { WorkerPort } from "../protocol/ports.js";

export * from "../page/exports.js";

/** The used part of a Worker of node:worker_threads. */
export interface NodeWorker {
  postMessage(message: unknown): void;
  on(event: "message" | "error" | "messageerror" | "exit", listener: (value: unknown) => void): unknown;
  terminate(): unknown;
}

/** Options of the page's engine, with another kind of worker. */
export interface NodeEngineOptions extends Omit<EngineOptions, "worker"> {
  /**
   * The engine's worker, for programs that are bundled: a Worker of `nearfar/node/worker`, as the bundler
   * names that file. The engine owns the worker from then on.
   */
  readonly worker?: () => NodeWorker;
}

/**
 * Loads the artifact at `place`: a folder, or an address of one. The engine computes in threads of its own,
 * which keep the process alive until `dispose`.
 *
 * @throws ArtifactError, DeviceError, or the reason of `signal` when that says so.
 */
export async function createEngine(place: string | URL, options: NodeEngineOptions = {}): Promise<Engine> {
  throwIfAborted(options.signal);
  const { worker = workerOfFile, ...others } = options;
  return openEngine(() => portOf(worker()), addressOf(place), others);
}

/**
 * Text that does not begin as a URL is a path. A drive of Windows has one letter, so it is not a URL's scheme.
 */
function addressOf(place: string | URL): URL {
  if (place instanceof URL || /^[a-z][a-z0-9+.-]+:/i.test(place)) return modelUrl(place);
  return pathToFileURL(resolve(place) + sep);
}

function workerOfFile(): NodeWorker {
  return new Worker(new URL("./worker.js", import.meta.url));
}

function portOf(worker: NodeWorker): WorkerPort {
  return {
    postMessage: (message) => worker.postMessage(message),
    addEventListener: (type: string, listener: (event: never) => void) => {
      if (type === "message") worker.on("message", (data) => listener({ data } as never));
      else if (type === "messageerror") worker.on(type, () => listener({} as never));
      else {
        worker.on("error", (error) => listener({ message: String(error) } as never));
        // process.exit() in the worker is not an error; after `terminate` there is no listener any more.
        worker.on("exit", (code) => listener({ message: `it ended with code ${code}` } as never));
      }
    },
    terminate: () => worker.terminate(),
  };
}
