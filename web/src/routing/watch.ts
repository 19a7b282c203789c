/** Watches a device's answer with the monitor. */

import { type ChunkContents, ends } from "./leg.js";
import { type Doubt, Monitor, type WatchedToken } from "./monitor.js";
import type { HybridRequest } from "./openai.js";
import type { MonitorOptions } from "./policy.js";
import type { Reason } from "./types.js";

/** Number of alternatives that are requested where entropy is watched. */
const TOP_LOGPROBS = 5;

export class Watch {
  /** Off once it has found something: then another side continues, or none can. */
  on = true;
  readonly monitor: Monitor;

  /**
   * `logprobs`: whether the device has them. `first`: whether the first tokens are kept, for records or for the
   * router's `doubt`.
   */
  constructor(
    private readonly options: MonitorOptions,
    private readonly logprobs: boolean,
    private readonly first: boolean,
    doubt: Doubt | null,
  ) {
    this.monitor = new Monitor(options, doubt);
  }

  /** The request with the logprobs that the monitor needs. */
  request(request: HybridRequest): HybridRequest {
    const { logprob, entropy } = this.options;
    const entropies = this.first || entropy !== null;
    if (!this.logprobs || (logprob === null && !entropies)) return request;
    const top_logprobs = Math.max(request.top_logprobs ?? 0, entropies ? TOP_LOGPROBS : 0);
    return { ...request, logprobs: true, top_logprobs };
  }

  /**
   * Returns why the answer should be escalated at this piece, or null. A piece without logprobs counts as one
   * token.
   */
  push(piece: ChunkContents): Reason | null {
    const [choice] = piece.choices;
    if (!this.on || !choice) return null;
    if (ends(piece)) return this.monitor.end();
    const tokens: WatchedToken[] = (choice.logprobs?.content ?? []).map(
      ({ token, logprob, top_logprobs }) => ({
        text: token,
        logprob,
        top: top_logprobs.map((other) => other.logprob),
      }),
    );
    const text = choice.delta.content ?? "";
    if (tokens.length === 0 && text !== "") tokens.push({ text, logprob: null, top: [] });
    for (const token of tokens) {
      const low = this.monitor.push(token);
      if (low) return low;
    }
    return null;
  }
}
