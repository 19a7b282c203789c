/** Records of decisions, for later training: JSON lines, without any text unless the policy allows it. */

import type { Knowledge } from "./knowledge.js";
import type { First, Monitor } from "./monitor.js";
import type { RouteInfo, Usage } from "./openai.js";
import type { RoutePlan, Told } from "./plan.js";
import type {
  CloudState,
  DeviceState,
  Mode,
  PrivateBy,
  Reason,
  RouteDecision,
  RouteRequest,
  Side,
} from "./types.js";

/** The outcome of a request. */
export interface Outcome {
  readonly route: Side | null;
  /** All sides that gave a part of the answer, in order. */
  readonly path: readonly Side[];
  readonly degraded: boolean;
  readonly reasons: readonly Reason[];
  /** Seconds from the request to the first token, and to the end. */
  readonly ttft: number | null;
  readonly seconds: number;
  readonly prompt_tokens: number;
  readonly completion_tokens: number;
  /** The cloud's cost, and what it would have cost beyond that, in the policy's unit. */
  readonly spent: number;
  readonly saved: number;
  readonly finish: string | null;
  /** The monitor's extreme means, for the calibration of its limits. */
  readonly lowest_logprob: number | null;
  readonly highest_entropy: number | null;
  /** The first tokens of the device's answer, for fitting a router; null where they were not kept. */
  readonly first_tokens: readonly First[] | null;
  /** "stopped" where the caller left, else the kind of error. */
  readonly error: string | null;
}

/** The inputs of a routed request, its decision and its outcome. */
export interface DecisionRecord {
  readonly id: string;
  readonly time: string;
  readonly request: RouteRequest;
  readonly private_by: PrivateBy | null;
  readonly device: DeviceState;
  readonly cloud: CloudState;
  readonly policy: { readonly mode: Mode; readonly difficulty_threshold: number };
  /** The decision that was carried out, and in shadow mode the one without it. */
  readonly decision: RouteDecision;
  readonly would: RouteDecision | null;
  readonly outcome: Outcome;
  /** What the device's model showed about the prompt, and which artifact it was. */
  readonly knowledge?: Knowledge;
  readonly model?: string;
  readonly artifact?: string;
  readonly text?: { readonly messages: readonly unknown[]; readonly answer: string };
}

/** How an answer ended, for its record. */
export interface Ending {
  readonly info: RouteInfo;
  readonly usage: Usage;
  readonly ttft: number | null;
  readonly seconds: number;
  readonly finish: string | null;
  readonly monitor: Monitor | null;
  readonly beginning: Monitor | null;
  readonly text: string;
  readonly failure: unknown;
}

/**
 * The record of a plan and its end. It has texts only where the policy allows them, and never those of a
 * private request.
 */
export function recordOf(plan: RoutePlan, created: number, ending: Ending): DecisionRecord {
  const { id, request, private_by, device, cloud, policy, decision, would, messages, told } = plan;
  const { info, usage, ttft, seconds, finish, monitor, beginning, text, failure } = ending;
  const { spent, saved, path, degraded, reasons, route } = info;
  const { prompt_tokens, completion_tokens } = usage;
  const left = finish === null && (failure === null || isAbort(failure));
  return {
    id,
    time: new Date(created * 1000).toISOString(),
    request,
    private_by,
    device,
    cloud,
    policy: { mode: policy.mode, difficulty_threshold: policy.difficulty_threshold },
    decision,
    would,
    outcome: {
      route: path.length > 0 ? route : null,
      path,
      degraded,
      reasons,
      ttft,
      seconds,
      prompt_tokens,
      completion_tokens,
      spent,
      saved,
      finish,
      lowest_logprob: monitor?.lowestLogprob ?? null,
      highest_entropy: monitor?.highestEntropy ?? null,
      first_tokens: beginning?.first ?? null,
      error: left ? "stopped" : failure === null ? null : nameOf(failure),
    },
    ...(told && !request.private && toldOf(told)),
    ...(policy.record_text && !request.private && { text: { messages, answer: text } }),
  };
}

function toldOf({
  knowledge,
  model,
  artifact,
}: Told): Pick<DecisionRecord, "knowledge" | "model" | "artifact"> {
  return { knowledge, model, artifact };
}

function isAbort(error: unknown): boolean {
  return error instanceof DOMException && error.name === "AbortError";
}

/** The kind of an error: its message may quote the prompt. */
function nameOf(error: unknown): string {
  return error instanceof Error ? error.name : "unknown";
}

/** The latest records, kept in memory. */
export class Records {
  readonly #kept: DecisionRecord[] = [];

  constructor(
    private readonly most: number,
    private readonly tell: (record: DecisionRecord) => void,
  ) {}

  add(record: DecisionRecord): void {
    this.#kept.push(record);
    if (this.#kept.length > this.most) this.#kept.shift();
    this.tell(record);
  }

  get all(): readonly DecisionRecord[] {
    return this.#kept;
  }

  /** The records, one JSON object per line. */
  jsonLines(): string {
    return this.#kept.map((record) => `${JSON.stringify(record)}\n`).join("");
  }
}
