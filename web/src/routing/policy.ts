/**
 * The policy: settings that an application's owner chooses once. Defaults are Python's (routing/policy.py);
 * docs/routing.md explains every field.
 */

import { meant, RequestError } from "../protocol/errors.js";
import type { RouterModel } from "./router-model.js";
import { MODES, type Mode, type Side } from "./types.js";

/**
 * `failures` in a row open the circuit for `seconds`; each failed probe doubles that time, up to
 * `max_seconds`.
 */
export interface BreakerOptions {
  readonly failures: number;
  readonly seconds: number;
  readonly max_seconds: number;
}

/**
 * How a failed call to the cloud is retried before any of its answer was shown; times in seconds. Where the
 * device can answer, it does so after `before_fallback` retries.
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

/** When a device's answer counts as going wrong; null turns a check off. */
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

/**
 * Seconds to wait: for the cloud's connection, first token and next token, and for the device's first and
 * next token. The device's first token may take long, because kernels may have to be compiled.
 */
export interface Timeouts {
  readonly connect: number;
  readonly first_token: number;
  readonly between: number;
  readonly device_first_token: number;
  readonly device_between: number;
}

/** The complete rules that decide between device and cloud. */
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
  /**
   * A fitted router, its address or its JSON; or "record", which decides as without one and records what it would
   * look at.
   */
  readonly router: RouterModel | string | null;
  readonly monitor: MonitorOptions;
  readonly breaker: BreakerOptions;
  readonly device_breaker: BreakerOptions;
  readonly retry: RetryOptions;
  readonly calibration: CalibrationOptions;
  readonly timeouts: Timeouts;
}

/** A policy as callers write it: missing fields have their defaults. */
export type PolicyOptions = Partial<{
  readonly [Key in keyof Policy]: Policy[Key] extends object ? Partial<Policy[Key]> : Policy[Key];
}>;

/** The defaults of a policy. */
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
  escalation: "restart",
  hold_tokens: 0,
  after_cut: "device",
  hedge_seconds: null,
  shadow: null,
  record_text: false,
  router: null,
  monitor: {
    window: 16,
    min_tokens: 8,
    logprob: null,
    entropy: null,
    repeats: 4,
    period: 16,
    min_repeat: 24,
  },
  breaker: { failures: 3, seconds: 5, max_seconds: 300 },
  device_breaker: { failures: 2, seconds: 30, max_seconds: 300 },
  retry: { attempts: 2, base: 0.25, cap: 4, max_wait: 5, ratio: 0.1, before_fallback: 0, burst: 5 },
  calibration: { rate: 0.1, floor: 0.002 },
  timeouts: { connect: 5, first_token: 30, between: 30, device_first_token: 120, device_between: 30 },
};

const ONE_OF = {
  mode: MODES,
  budget_unit: ["tokens", "money"],
  escalation: ["off", "continue", "restart"],
  after_cut: ["device", "cloud"],
  shadow: [null, "device", "cloud"],
} as const;
const SHARES = ["difficulty_threshold", "battery_floor", "target_share"];
/** Numbers that may be null, in addition to those whose default is null. */
const NULLABLE = ["ttft", "repeats"];
const WHOLE = [
  "default_max_tokens",
  "hold_tokens",
  "failures",
  "attempts",
  "before_fallback",
  "window",
  "min_tokens",
  "repeats",
  "period",
  "min_repeat",
];
/** The least value of a policy's numbers; 0 for numbers that are not listed. */
const LEAST: Readonly<Record<string, number>> = {
  window: 1,
  period: 1,
  failures: 1,
  default_max_tokens: 1,
  logprob: Number.NEGATIVE_INFINITY,
};

/** Fills in the defaults. Throws RequestError for unknown names and senseless values. */
export function parsePolicy(options: PolicyOptions = {}): Policy {
  return merged(DEFAULT_POLICY, options, "the policy");
}

function merged<T extends object>(defaults: T, options: unknown, where: string): T {
  if (typeof options !== "object" || options === null || Array.isArray(options))
    throw new RequestError(`${where} must be an object, not ${JSON.stringify(options)}`, where);
  const [unknown] = Object.keys(options).filter((name) => !Object.hasOwn(defaults, name));
  if (unknown !== undefined)
    throw new RequestError(
      `${where} has no field ${unknown}${meant(unknown, Object.keys(defaults))}`,
      unknown,
    );
  const entries = Object.entries(options).filter(([, value]) => value !== undefined);
  const values = entries.map(([name, value]: [string, unknown]) => {
    const known: unknown = defaults[name as keyof T];
    if (typeof known === "object" && known !== null) return [name, merged(known, value, name)];
    const wrong = wrongIn(name, known, value);
    if (wrong !== null)
      throw new RequestError(`${name} must be ${wrong}, not ${JSON.stringify(value)}`, name);
    return [name, value];
  });
  return { ...defaults, ...Object.fromEntries(values) };
}

/** Describes the values that a field allows; null if this value is one. */
function wrongIn(name: string, known: unknown, value: unknown): string | null {
  if (Object.hasOwn(ONE_OF, name)) {
    const allowed: readonly unknown[] = ONE_OF[name as keyof typeof ONE_OF];
    return allowed.includes(value) ? null : `one of ${allowed.join(", ")}`;
  }
  if (name === "router") {
    const fits = typeof value === "string" || (typeof value === "object" && !Array.isArray(value));
    return fits ? null : 'the address of a router, its JSON, "record" or null';
  }
  if (value === null && (known === null || NULLABLE.includes(name))) return null;
  if (typeof known === "boolean") return typeof value === "boolean" ? null : "true or false";
  if (WHOLE.includes(name) && !Number.isInteger(value)) return "a whole number";
  if (typeof value !== "number" || !Number.isFinite(value)) return "a number";
  if (SHARES.includes(name)) return value >= 0 && value <= 1 ? null : "from 0 to 1";
  const least = LEAST[name] ?? 0;
  return value >= least ? null : `at least ${least}`;
}
