import type { WorkerPort } from "../protocol/ports.js";
import { portHere } from "../shared/port.js";
import { Share } from "../shared/share.js";
import type { Host } from "./host.js";
import { parts } from "./parts/index.js";
import { serve } from "./session/serve.js";

/** A connection to an engine in this thread. */
export function engineHere(host: Host): WorkerPort {
  return portHere((scope) => serve(scope, host, parts));
}

/** An engine in this thread for all pages that connect. */
export function hosted(host: Host): Share {
  return new Share(() => engineHere(host));
}
