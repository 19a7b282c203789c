import type { WorkerPort } from "../protocol/ports.js";
import { portHere } from "../shared/port.js";
import { Share } from "../shared/share.js";
import type { Host } from "./host.js";
import { parts } from "./parts/index.js";
import { serve } from "./session/serve.js";

/** The line to an engine of this thread. */
export function engineHere(host: Host): WorkerPort {
  return portHere((scope) => serve(scope, host, parts));
}

/** An engine of this thread for the pages that connect. */
export function hosted(host: Host): Share {
  return new Share(() => engineHere(host));
}
