/** A request's decision, and its reservations until it ends. */

import type { Breaker, Pass } from "./breaker.js";
import type { HeldPrompt } from "./knowledge.js";
import type { Doubt } from "./monitor.js";
import type { Message } from "./openai.js";
import type { Policy } from "./policy.js";
import type { Marks } from "./privacy.js";
import type { CloudState, DeviceState, PrivateBy, RouteDecision, RouteRequest, Side } from "./types.js";

/** A decision with its inputs. */
export interface RoutePlan {
  readonly id: string;
  readonly messages: readonly Message[];
  readonly request: RouteRequest;
  /** Why it was private when it was decided, and the marks by which it may become private later. */
  readonly private_by: PrivateBy | null;
  readonly marks: Marks;
  readonly conversation: string | null;
  readonly policy: Policy;
  readonly device: DeviceState;
  readonly cloud: CloudState;
  /** The decision that is carried out. */
  readonly decision: RouteDecision;
  /** In shadow mode: the decision without it. */
  readonly would: RouteDecision | null;
  readonly ticket: Ticket;
  readonly told: Told | null;
}

/** What the device's model showed about a prompt, which stays in its cache until `release`. */
export interface Told extends HeldPrompt {
  readonly model: string;
  /** What a fitted router is tied to: the checkpoint's SHA-256 and the quantization scheme. */
  readonly artifact: string;
  /** The probability that the cloud answers better, from a fitted router; null without one. */
  readonly gain: number | null;
  /** The router's judge of the first tokens of the answer, which are held back for it; null: none. */
  readonly judge: { readonly tokens: number; readonly doubt: Doubt } | null;
}

/**
 * How a side's part ended: complete, left by us or the caller, rejected by the side as a wrong request, or
 * failed.
 */
export type Settled = "ok" | "left" | "refused" | Error;

/** A call to one side under way, with what its breaker and the ledger need at its end. */
export interface Ticket {
  readonly side: Side;
  readonly pass: Pass;
  readonly breaker: Breaker;
  readonly reservation: number | null;
  ended: boolean;
}
