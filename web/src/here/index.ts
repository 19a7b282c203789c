/**
 * nearfar without workers, such as in a service worker: `createEngine(url)` answers in the thread of its
 * caller, which is blocked while a step is computed.
 */

import { modelUrl } from "../artifact/places.js";
import type { Follow } from "../grammar/in-thread.js";
import { type Engine, openEngine } from "../page/client.js";
import type { EngineOptions } from "../page/options.js";
import { later, throwIfAborted } from "../protocol/errors.js";
import type { SharePort } from "../shared/share.js";
import type { Host } from "../worker/host.js";
import { engineHere, hosted } from "../worker/hosted.js";

export * from "../page/exports.js";
export type { Follow, SharePort };

/** Options for a thread without workers. */
export interface ShareOptions {
  /**
   * The code that follows grammars, for `response_format` and `tools`. Only service workers have to pass it,
   * by a static import of `grammars` from `nearfar/here/grammars`; elsewhere it is loaded when a request
   * needs it.
   */
  readonly grammars?: Follow;
}

/** Options of the page's engine, without the options for workers. */
export interface HereOptions extends Omit<EngineOptions, "worker" | "threads">, ShareOptions {}

/**
 * Loads the artifact at `url`.
 *
 * @throws ArtifactError, DeviceError, or the reason of `signal` when that says so.
 */
export async function createEngine(
  url: string | URL,
  { grammars, ...options }: HereOptions = {},
): Promise<Engine> {
  throwIfAborted(options.signal);
  return openEngine(() => engineHere(hostOf(grammars)), modelUrl(url), options);
}

/**
 * Shares one engine among several pages. The engine runs in the calling thread: a SharedWorker's or a service
 * worker's. Each page calls `createEngine` with `worker: () => sharedEngine(port)`; the other end of `port`
 * is passed to `connect`. The first page's load loads the model, which is freed with the last page that
 * disposes of its engine.
 */
export function shareEngine({ grammars }: ShareOptions = {}): { connect(port: SharePort): unknown } {
  return hosted(hostOf(grammars));
}

function hostOf(given: Follow | undefined): Host {
  const load = async (): Promise<Follow> =>
    given ?? (await later(() => import("./grammars.js"), "nearfar/here/grammars")).grammars;
  return { spawn: null, grammars: given || !isServiceWorker() ? load : null, hardwareThreads: 1 };
}

/** Whether code must be imported statically. */
function isServiceWorker(): boolean {
  const { ServiceWorkerGlobalScope: Scope } = globalThis as { ServiceWorkerGlobalScope?: new () => object };
  return !!Scope && globalThis instanceof Scope;
}
