/**
 * nearfar where there are no workers, such as in a service worker: `createEngine(url)` answers in the thread
 * that it is called in, which waits while a step is computed.
 */

import { throwIfAborted } from "../both/errors.js";
import { modelUrl } from "../both/places.js";
import { type Engine, type EngineOptions, openEngine, type WorkerPort } from "../page/client.js";
import { serve } from "../worker/serve.js";

export * from "../page/exports.js";

export type HereOptions = Omit<EngineOptions, "worker" | "threads">;

/**
 * Loads the artifact at `url`.
 *
 * @throws ArtifactError, DeviceError, or the reason of `signal` when that says so.
 */
export async function createEngine(url: string | URL, options: HereOptions = {}): Promise<Engine> {
  throwIfAborted(options.signal);
  return openEngine(here, modelUrl(url), options);
}

/** Both sides of the line in one thread. */
function here(): WorkerPort {
  const { port1, port2 } = new MessageChannel();
  const scope = {
    postMessage: (message: unknown) => port2.postMessage(message),
    addEventListener: (_: "message", listener: (event: MessageEvent) => void) => {
      port2.onmessage = listener;
    },
  };
  serve(scope, { spawn: null, hardwareThreads: 1 });
  return {
    postMessage: (message) => port1.postMessage(message),
    addEventListener: (type: string, listener: (event: never) => void) => {
      if (type === "message") port1.onmessage = (event) => listener(event as never);
    },
    terminate: () => port1.close(),
  };
}
