/** An answer while it is generated, in one round or, where tools are called, in several. */

import { addCall } from "../src/protocol/calls.js";
import type { ToolCall } from "../src/protocol/openai.js";
import type { Chunk, RouteInfo } from "../src/routing/index.js";
import type { Call } from "./tools.js";

/** How an answer ended and what it cost; times in milliseconds. */
export interface Outcome {
  readonly reason: "stop" | "length" | "aborted";
  readonly tokens: number;
  readonly ttft: number | null;
  /** Tokens per second after the first token; null for too few tokens. */
  readonly rate: number | null;
}

export interface Listener {
  append(text: string): void;
  called(calls: readonly Call[]): void;
  route(info: RouteInfo, model: string): void;
}

/** An answer while it is generated, with what the page sees of its cost. */
export class Written {
  reason: Outcome["reason"] = "stop";
  readonly #started = performance.now();
  readonly #times: number[] = [];
  #tokens = 0;
  #info: RouteInfo | null = null;

  /** Forwards the text; returns the calls with which it ended, none where it was cut. */
  async read(chunks: AsyncIterable<Chunk>, { append, route }: Listener): Promise<readonly ToolCall[]> {
    const calls: ToolCall[] = [];
    let before = 0;
    for await (const { choices, usage, x_nearfar: info, model } of chunks) {
      const { delta, finish_reason: reason } = choices[0] ?? {};
      const text = delta?.content ?? "";
      if (text !== "") this.#times.push(performance.now());
      append(text);
      for (const piece of delta?.tool_calls ?? []) addCall(calls, piece);
      if (reason === "length") {
        this.reason = "length";
        calls.length = 0;
      }
      before = usage?.completion_tokens ?? before;
      this.#info = info ?? this.#info;
      if (info) route(info, model);
    }
    this.#tokens += before;
    return this.reason === "length" ? [] : calls;
  }

  /** Whether this device alone wrote the answer. */
  get isOfDevice(): boolean {
    return this.#info?.path.join() === "device";
  }

  get outcome(): Outcome {
    const { reason } = this;
    const [first] = this.#times;
    if (first === undefined) return { reason, tokens: this.#tokens, ttft: null, rate: null };
    const seconds = ((this.#times.at(-1) ?? first) - first) / 1000;
    const rate = seconds > 0 ? (this.#tokens - 1) / seconds : null;
    return { reason, tokens: this.#tokens, ttft: first - this.#started, rate };
  }
}
