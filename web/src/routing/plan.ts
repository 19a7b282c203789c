/** What is settled of a request before it begins, and what is held of it until it ends. */

import type { Breaker, Pass } from "./breaker.js";
import type { Message } from "./openai.js";
import type { Policy } from "./policy.js";
import type { Marks } from "./privacy.js";
import type { CloudState, Decision, DeviceState, PrivateBy, RouteRequest, Side } from "./types.js";

/** A decision with what it was made from. */
export interface Plan {
  readonly id: string;
  readonly messages: readonly Message[];
  readonly request: RouteRequest;
  /** What made it private when it was decided, and what it may become private by. */
  readonly private_by: PrivateBy | null;
  readonly marks: Marks;
  readonly conversation: string | null;
  readonly policy: Policy;
  readonly device: DeviceState;
  readonly cloud: CloudState;
  /** What is done. */
  readonly decision: Decision;
  /** In shadow mode: what would have been done. */
  readonly would: Decision | null;
  readonly ticket: Ticket;
}

/**
 * How a side's part ended: whole, left by us or the caller, refused by the side as a wrong request, or
 * failed.
 */
export type Settled = "ok" | "left" | "refused" | Error;

/** A call to one side on its way: what its breaker and the ledger must hear of its end. */
export interface Ticket {
  readonly side: Side;
  readonly pass: Pass;
  readonly breaker: Breaker;
  readonly reservation: number | null;
  ended: boolean;
}
