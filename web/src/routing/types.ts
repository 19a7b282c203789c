/** Inputs and output of the decision. The names are those of the shared JSON vectors and of Python. */

/**
 * Why a request is private: it says so ("request"), it carries an earlier private text ("earlier"), or it
 * quotes one.
 */
export type PrivateBy = "request" | "earlier" | "quote";
/** A side that can answer. */
export type Side = "device" | "cloud";
/** Modes, from the device alone to the cloud alone. */
export const MODES = ["device_only", "prefer_device", "auto", "prefer_cloud", "cloud_only"] as const;
/** Which side is preferred, or allowed. */
export type Mode = (typeof MODES)[number];
/** A feature that a request needs and not every side has. */
export type Feature =
  | "tools"
  | "json_schema"
  | "json_object"
  | "grammar"
  | "images"
  | "logprobs"
  | "reasoning";

/** A conversation's last side, its tokens in each side's cache, and its cost so far. */
export interface ConversationState {
  readonly last_route: Side | null;
  readonly cached_device: number;
  readonly cached_cloud: number;
  readonly spent: number;
}

/** A request as the decision sees it: counts, no text. `expected_tokens` is the answer's likely length. */
export interface RouteRequest {
  readonly prompt_tokens: number;
  readonly max_tokens: number;
  readonly expected_tokens: number | null;
  readonly features: readonly Feature[];
  /** The difficulty from 0 to 1; null where it was not scored. */
  readonly difficulty: number | null;
  readonly mode: Mode | null;
  readonly private: boolean;
  /** Whether the request is private because it quotes a private text. */
  readonly quotes_private: boolean;
  readonly conversation: ConversationState;
}

/**
 * The device's present state. `context`, `free_kv_tokens`: tokens; speeds: tokens per second; `battery`: 0 to
 * 1.
 */
export interface DeviceState {
  readonly available: boolean;
  readonly why: string | null;
  readonly context: number;
  readonly free_kv_tokens: number;
  readonly features: readonly Feature[];
  readonly prefill_tps: number | null;
  readonly decode_tps: number | null;
  readonly queue_seconds: number;
  readonly battery: number | null;
  readonly charging: boolean | null;
  readonly power_saver: boolean | null;
  /** Whether the device computes on this machine. */
  readonly here: boolean;
}

/**
 * The cloud's present state. Times in seconds, prices per million tokens; `round_trip` is the TTFT without
 * prefill.
 */
export interface CloudState {
  readonly available: boolean;
  readonly why: string | null;
  readonly breaker: "closed" | "half_open" | "open";
  readonly retry_after: number;
  readonly context: number | null;
  readonly features: readonly Feature[];
  readonly round_trip: number | null;
  readonly queue_seconds: number;
  readonly prefill_tps: number | null;
  readonly decode_tps: number | null;
  readonly metered: boolean | null;
  readonly price_in: number;
  readonly price_out: number;
}

/**
 * One reason: docs/routing.md lists the codes. `value` is the measured value, `limit` the limit it was
 * compared with.
 */
export interface Reason {
  readonly code: string;
  readonly side: Side | null;
  readonly value: number | string | null;
  readonly limit: number | string | null;
}

/** Predicted seconds to the first token and to the last; null where a speed is unknown. */
export interface Prediction {
  readonly ttft: number;
  readonly total: number | null;
}

/** Where a request goes, and where it goes if that fails. `route` null: nowhere, and `reasons` say why. */
export interface RouteDecision {
  readonly route: Side | null;
  readonly fallback: Side | null;
  /** Whether the device answers though the cloud was wanted. */
  readonly degraded: boolean;
  readonly reasons: readonly Reason[];
  readonly predicted: { readonly device: Prediction | null; readonly cloud: Prediction | null };
  /** The most that the cloud may charge for the request, in the policy's unit. */
  readonly cost: number;
}

/** The state of a new conversation. */
export const NO_CONVERSATION: ConversationState = {
  last_route: null,
  cached_device: 0,
  cached_cloud: 0,
  spent: 0,
};

export function reason(
  code: string,
  side: Side | null = null,
  value: Reason["value"] = null,
  limit: Reason["limit"] = null,
): Reason {
  return { code, side, value, limit };
}
