import type { Host } from "../worker/host.js";
import { portHere } from "./port.js";
import { Share } from "./share.js";

/** An engine of this thread for the pages that connect. */
export function hosted(host: Host): Share {
  return new Share(() => portHere(host));
}
