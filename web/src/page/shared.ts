import { later } from "../protocol/errors.js";
import type { WorkerPort } from "../protocol/ports.js";
import { Pulse } from "../protocol/pulse.js";
import { startWorker } from "./client.js";

/** Which shared engine of an origin to use. */
export interface SharedOptions {
  /** Pages with the same name have one engine, and so one model; "nearfar" by default. */
  readonly name?: string;
}

/**
 * One engine for all pages of an origin that call this function; the result is for `createEngine`'s option
 * `worker`. The engine runs in a SharedWorker of the package. In browsers without SharedWorker it runs in the
 * worker of one of the pages: when that page is closed or frozen, another page loads the model, and answers
 * that had begun end with a DeviceError of the code "device-lost". Without SharedWorker and locks (pages
 * without https) each page has its own engine.
 */
export function sharedEngine(options?: SharedOptions): Promise<WorkerPort>;
/**
 * An engine of `shareEngine` (`nearfar/here`) over a port whose other end was passed to `connect`; the result
 * is for `createEngine`'s option `worker`. Each call of `createEngine` needs a port of its own.
 */
export function sharedEngine(port: MessagePort): WorkerPort;
export function sharedEngine(given: MessagePort | SharedOptions = {}): WorkerPort | Promise<WorkerPort> {
  if ("postMessage" in given) return overPort(given);
  const name = `nearfar shared ${given.name ?? "nearfar"}`;
  // Bundlers look for exactly this expression, which must stand beside worker.js.
  const worker = (): SharedWorker =>
    new SharedWorker(new URL("./worker.js", import.meta.url), { type: "module", name });
  const places = { worker, overPort, startWorker, Pulse };
  return later(() => import("../shared/tabs.js"), "The code of sharedEngine").then(({ openShared }) =>
    openShared(name, places),
  );
}

function overPort(port: MessagePort): WorkerPort {
  // A page that is closed sends no more messages.
  globalThis.addEventListener?.("pagehide", ({ persisted }) => {
    if (!persisted) port.postMessage({ type: "dispose" });
  });
  return {
    postMessage: (message) => port.postMessage(message),
    addEventListener: (type: string, listener: (event: never) => void) => {
      if (type !== "message") return;
      port.addEventListener("message", (event) => listener(event as never));
      port.start();
    },
    terminate: () => {
      port.postMessage({ type: "dispose" });
      port.close();
    },
  };
}
