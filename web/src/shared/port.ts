import type { WorkerPort, WorkerScope } from "../protocol/ports.js";

/** Connects both sides in one thread; `serve` answers at the worker's end. */
export function portHere(serve: (scope: WorkerScope) => void): WorkerPort {
  const { port1, port2 } = new MessageChannel();
  serve({
    postMessage: (message: unknown) => port2.postMessage(message),
    addEventListener: (_: "message", listener: (event: MessageEvent) => void) => {
      port2.onmessage = listener;
    },
  });
  return {
    postMessage: (message) => port1.postMessage(message),
    addEventListener: (type: string, listener: (event: never) => void) => {
      if (type === "message") port1.onmessage = (event) => listener(event as never);
    },
    terminate: () => port1.close(),
  };
}
