/** Words for reasons, for errors and for people. docs/routing.md lists the codes. */

import { RouteError } from "../protocol/errors.js";
import type { Reason } from "./types.js";

type Words = (value: string, limit: string) => string;

const WORDS: Readonly<Record<string, Words>> = {
  private: () => "the request is private",
  private_quote: () => "the request quotes a private text",
  elsewhere: (value) => (value === "" ? "does not prove that it computes here" : value),
  mode: (value) => `the mode is ${value}`,
  unavailable: (value) => (value === "" ? "not available" : value),
  offline: () => "the browser is offline",
  breaker_open: (value) => `failed lately, tried again in ${value} s`,
  retry_after: (value) => `asked to wait for ${value} s`,
  context: (value, limit) => `${value} tokens do not fit the context of ${limit}`,
  kv_memory: (value, limit) => `${value} tokens do not fit the ${limit} that are free in the cache`,
  feature: (value) => `has no ${value}`,
  slow_ttft: (value, limit) => `first token after ${value} s, later than ${limit} s`,
  slow_total: (value, limit) => `whole answer after ${value} s, later than ${limit} s`,
  battery: (value, limit) => `battery at ${value}, below ${limit}`,
  power_saver: () => "the device saves power",
  metered: () => "the connection is metered",
  hard: (value, limit) => `difficulty ${value}, at least ${limit}`,
  easy: (value, limit) => `difficulty ${value}, below ${limit}`,
  budget_conversation: (value, limit) => `the conversation would cost ${value} of ${limit}`,
  budget_day: (value, limit) => `the day would cost ${value} of ${limit}`,
  sticky: () => "the conversation is in its cache",
  preferred: () => "preferred",
  low_logprob: (value, limit) => `mean logprob ${value}, below ${limit}`,
  high_entropy: (value, limit) => `mean entropy ${value}, above ${limit}`,
  doubtful: (value, limit) => `the cloud is better with probability ${value}, at least ${limit}`,
  repetition: (value, limit) => `repeats itself: ${value} tokens with period ${limit}`,
  hedged: (value) => `asked too, after ${value} s of silence`,
  refused: (value) => `rejected the request${value === "" ? "" : ` (${value})`}`,
  failed: (value) => `failed (${value})`,
  cut: (value) => `broke off (${value})`,
};

/** Describes a reason, for example "device: difficulty 0.7, at least 0.5". */
export function describeReason({ code, side, value, limit }: Reason): string {
  const said = WORDS[code]?.(shown(value), shown(limit)) ?? [code, shown(value)].filter(Boolean).join(" ");
  return side === null ? said : `${side}: ${said}`;
}

/** Makes the error of a request that no side can take; `cause` has the reasons for programs. */
export function noRoute(reasons: readonly Reason[]): RouteError {
  return new RouteError(
    `Neither device nor cloud may answer (${reasons.map(describeReason).join("; ")}). Change the mode or ` +
      "the policy, or try later.",
    { cause: reasons },
  );
}

function shown(value: number | string | null): string {
  if (typeof value === "number") return String(Number(value.toPrecision(3)));
  return value ?? "";
}
