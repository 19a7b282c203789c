import type { WorkerPort } from "../page/client.js";
import type { Host } from "../worker/host.js";
import { serve } from "../worker/session/serve.js";

/** Both sides of the line in one thread. */
export function portHere(host: Host): WorkerPort {
  const { port1, port2 } = new MessageChannel();
  const scope = {
    postMessage: (message: unknown) => port2.postMessage(message),
    addEventListener: (_: "message", listener: (event: MessageEvent) => void) => {
      port2.onmessage = listener;
    },
  };
  serve(scope, host);
  return {
    postMessage: (message) => port1.postMessage(message),
    addEventListener: (type: string, listener: (event: never) => void) => {
      if (type === "message") port1.onmessage = (event) => listener(event as never);
    },
    terminate: () => port1.close(),
  };
}
