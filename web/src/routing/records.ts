/** Records of decisions, for later training: JSON lines, without any text unless the policy allows it. */

import type { CloudState, Decision, DeviceState, RouteRequest, Side } from "./types.js";

export interface Outcome {
  /** All sides that gave a part of the answer, in order. */
  readonly path: readonly Side[];
  readonly degraded: boolean;
  /** "stop", "length", …, "aborted", or "error". */
  readonly finish: string;
  readonly error: string | null;
  /** Seconds from the request to the first and to the last token. */
  readonly ttft: number | null;
  readonly total: number;
  readonly prompt_tokens: number;
  readonly completion_tokens: number;
  /** What the cloud charged, in the policy's unit. */
  readonly spent: number;
}

export interface DecisionRecord {
  readonly id: string;
  /** Unix time in seconds. */
  readonly time: number;
  readonly request: RouteRequest;
  readonly device: DeviceState;
  readonly cloud: CloudState;
  readonly threshold: number;
  readonly decision: Decision;
  /** The decision was recorded only; the answer came from elsewhere. */
  readonly shadow: boolean;
  readonly outcome: Outcome;
  readonly text?: { readonly messages: readonly unknown[]; readonly answer: string };
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

  /** One JSON object a line. */
  jsonLines(): string {
    return this.#kept.map((record) => `${JSON.stringify(record)}\n`).join("");
  }
}
