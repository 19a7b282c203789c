/**
 * What the decision is made from, and what it is. The names are those of the shared JSON vectors and of
 * Python.
 */

/** What makes a request private: it says so, it carries a text of an earlier one that did, or quotes one. */
export type PrivateBy = "request" | "earlier" | "quote";
/** Who answers. */
export type Side = "device" | "cloud";
/** From the device alone to the cloud alone. */
export const MODES = ["device_only", "prefer_device", "auto", "prefer_cloud", "cloud_only"] as const;
/** Which side is preferred, or allowed. */
export type Mode = (typeof MODES)[number];
/** What a request needs that not every side has. */
export type Feature =
  | "tools"
  | "json_schema"
  | "json_object"
  | "grammar"
  | "images"
  | "logprobs"
  | "reasoning";

/**
 * Where a conversation was answered last, what each side has of it in its cache (tokens), and what it has
 * cost.
 */
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
  /** 0 to 1; null where nobody scored it. */
  readonly difficulty: number | null;
  readonly mode: Mode | null;
  readonly private: boolean;
  /** It is private because it quotes a private text. */
  readonly quotes_private: boolean;
  readonly conversation: ConversationState;
}

/** The device now. `context`, `free_kv_tokens`: tokens; speeds: tokens a second; `battery`: 0 to 1. */
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
  /** It computes on this machine. */
  readonly here: boolean;
}

/**
 * The cloud now. Times in seconds, prices per million tokens; `round_trip` is the TTFT of a prompt that costs
 * nothing.
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
 * One reason: docs/routing.md lists the codes. `value` is what was found, `limit` what it was held against.
 */
export interface Reason {
  readonly code: string;
  readonly side: Side | null;
  readonly value: number | string | null;
  readonly limit: number | string | null;
}

/** Seconds to the first token and to the last; null where a speed is not known yet. */
export interface Prediction {
  readonly ttft: number;
  readonly total: number | null;
}

/** Where a request goes, and where it goes if that fails. `route` null: nowhere, and `reasons` say why. */
export interface Decision {
  readonly route: Side | null;
  readonly fallback: Side | null;
  /** The device answers, though the cloud was wanted. */
  readonly degraded: boolean;
  readonly reasons: readonly Reason[];
  readonly predicted: { readonly device: Prediction | null; readonly cloud: Prediction | null };
  /** The most that the cloud may charge for the request, in the policy's unit. */
  readonly cost: number;
}

/** What is known of a conversation that begins. */
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
