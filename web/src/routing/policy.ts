/** What the owner of an application decides once. Defaults are Python's (routing/policy.py); docs/routing.md explains every field. */

import { RequestError } from "../errors.js";
import { MODES, type Mode, type Side } from "./types.js";

/** `failures` in a row open the circuit for `seconds`; each failed probe doubles them, up to `max_seconds`. */
export interface BreakerOptions {
  readonly failures: number;
  readonly seconds: number;
  readonly max_seconds: number;
}

/**
 * How a failed call to the cloud is tried again before anything of its answer was shown; times in seconds. Where the device
 * can answer, it does after `before_fallback` retries.
 */
export interface RetryOptions {
  readonly attempts: number;
  readonly base: number;
  readonly cap: number;
  readonly max_wait: number;
  readonly ratio: number;
  readonly before_fallback: number;
  readonly burst: number;
}

/** When a device's answer is taken to go wrong. Null: not watched. */
export interface MonitorOptions {
  readonly window: number;
  readonly min_tokens: number;
  readonly logprob: number | null;
  readonly entropy: number | null;
  readonly repeats: number | null;
  readonly period: number;
  readonly min_repeat: number;
}

/** Step n of the threshold moves by at most max(`floor`, `rate`/√n). */
export interface CalibrationOptions {
  readonly rate: number;
  readonly floor: number;
}

/** Seconds to wait for the cloud: for a connection, the first token, the next token; and for the device's next token. */
export interface Timeouts {
  readonly connect: number;
  readonly first_token: number;
  readonly between: number;
  readonly device_between: number;
}

export interface Policy {
  readonly mode: Mode;
  readonly difficulty_threshold: number;
  readonly ttft: number | null;
  readonly completion: number | null;
  readonly battery_floor: number;
  readonly budget_conversation: number | null;
  readonly budget_day: number | null;
  readonly budget_unit: "tokens" | "money";
  readonly spent_day: number;
  readonly sticky_seconds: number;
  readonly target_share: number | null;
  readonly default_max_tokens: number;
  readonly escalation: "off" | "continue" | "restart";
  readonly hold_tokens: number;
  readonly after_cut: Side;
  readonly hedge_seconds: number | null;
  readonly shadow: Side | null;
  readonly record_text: boolean;
  readonly monitor: MonitorOptions;
  readonly breaker: BreakerOptions;
  readonly device_breaker: BreakerOptions;
  readonly retry: RetryOptions;
  readonly calibration: CalibrationOptions;
  readonly timeouts: Timeouts;
}

/** A policy as callers write it: what is left out has its default. */
export type PolicyOptions = Partial<{
  readonly [Key in keyof Policy]: Policy[Key] extends object ? Partial<Policy[Key]> : Policy[Key];
}>;

export const DEFAULT_POLICY: Policy = {
  mode: "auto",
  difficulty_threshold: 0.5,
  ttft: 2,
  completion: null,
  battery_floor: 0.2,
  budget_conversation: null,
  budget_day: null,
  budget_unit: "tokens",
  spent_day: 0,
  sticky_seconds: 1,
  target_share: null,
  default_max_tokens: 512,
  escalation: "off",
  hold_tokens: 0,
  after_cut: "device",
  hedge_seconds: null,
  shadow: null,
  record_text: false,
  monitor: { window: 16, min_tokens: 8, logprob: null, entropy: null, repeats: 4, period: 16, min_repeat: 24 },
  breaker: { failures: 3, seconds: 5, max_seconds: 300 },
  device_breaker: { failures: 2, seconds: 30, max_seconds: 300 },
  retry: { attempts: 2, base: 0.25, cap: 4, max_wait: 5, ratio: 0.1, before_fallback: 0, burst: 5 },
  calibration: { rate: 0.1, floor: 0.002 },
  timeouts: { connect: 5, first_token: 30, between: 30, device_between: 30 },
};

const SHARES = ["difficulty_threshold", "battery_floor", "target_share"] as const;
const AMOUNTS = ["ttft", "completion", "budget_conversation", "budget_day", "sticky_seconds", "hold_tokens"] as const;

/** Fills in the defaults. Throws RequestError for a name that nobody knows and for a value out of range. */
export function parsePolicy(options: PolicyOptions = {}): Policy {
  const policy: Policy = merged(DEFAULT_POLICY, options, "the policy");
  if (!MODES.includes(policy.mode))
    throw new RequestError(`mode must be one of ${MODES.join(", ")}, not ${JSON.stringify(policy.mode)}`, "mode");
  for (const name of SHARES) {
    const value = policy[name];
    if (value !== null && !(value >= 0 && value <= 1))
      throw new RequestError(`${name} must be from 0 to 1, not ${value}`, name);
  }
  for (const name of AMOUNTS) {
    const value = policy[name];
    if (value !== null && !(value >= 0)) throw new RequestError(`${name} must not be negative, not ${value}`, name);
  }
  if (policy.hedge_seconds !== null && policy.escalation !== "off")
    throw new RequestError("hedge_seconds and escalation exclude each other: set one of them", "hedge_seconds");
  return policy;
}

function merged<T extends object>(defaults: T, options: object, where: string): T {
  const unknown = Object.keys(options).filter((name) => !(name in defaults));
  if (unknown.length > 0)
    throw new RequestError(`${where} has no field ${unknown.sort().join(", ")}`, unknown[0] ?? null);
  const entries = Object.entries(options).filter(([, value]) => value !== undefined);
  const values = entries.map(([name, value]: [string, unknown]) => {
    const group: unknown = defaults[name as keyof T];
    const isGroup = typeof group === "object" && group !== null && typeof value === "object" && value !== null;
    return [name, isGroup ? merged(group, value, name) : value];
  });
  return { ...defaults, ...Object.fromEntries(values) };
}
