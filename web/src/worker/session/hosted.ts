import { portHere } from "../../shared/port.js";
import { Share } from "../../shared/share.js";
import type { Host } from "../host.js";

/** An engine of this thread for the pages that connect. */
export function hosted(host: Host): Share {
  return new Share(() => portHere(host));
}
