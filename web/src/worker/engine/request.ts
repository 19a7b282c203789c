import type { RequestStats } from "../../both/messages.js";
import type { FinishReason } from "../../both/openai.js";
import type { CachedSequence } from "../cache/sequence-table.js";
import type { SamplingParams } from "./sampling.js";

export interface TopLogprob {
  readonly token: number;
  readonly logprob: number;
}

export interface TokenLogprobs {
  readonly logprob: number;
  readonly top: readonly TopLogprob[];
}

/** Receives the answer of one request. After `finish` or `fail` nothing more comes. */
export interface RequestListener {
  /** A token of the answer, the end token excluded. Returns false to end the answer here. */
  token(token: number, logprobs: TokenLogprobs | null): boolean;
  finish(reason: FinishReason, stats: RequestStats): void;
  fail(error: Error): void;
}

/**
 * The state of one request; the scheduler owns it until it is done.
 *
 * `tokens` are the prompt and the answer as far as the host knows it; `queued` positions have been given to
 * the device, and `pending` of them end in a sampled token that has not been read yet.
 */
export class Request {
  readonly tokens: number[];
  sequence: CachedSequence | null = null;
  queued = 0;
  pending = 0;
  done = false;
  /** Whether the buffers of its slot (penalty counts, logit bias) hold its values. */
  slotReady = false;
  cachedTokens = 0;
  readonly #created = performance.now();
  #first = 0;
  #last = 0;

  constructor(
    readonly prompt: readonly number[],
    readonly params: SamplingParams,
    /** Tokens that may be generated. */
    public limit: number,
    readonly listener: RequestListener,
  ) {
    this.tokens = [...prompt];
  }

  /** Positions to queue before the next token can be sampled. */
  get remaining(): number {
    return this.tokens.length + this.pending - this.queued;
  }

  /** Tokens sampled so far, those still unread included. */
  get generated(): number {
    return this.tokens.length + this.pending - this.prompt.length;
  }

  /** Whether as many tokens are on their way as may be generated. */
  get exhausted(): boolean {
    return this.generated >= this.limit;
  }

  /** What the device held of it is void: it is to be computed again from its tokens. */
  restart(): void {
    this.sequence = null;
    this.queued = 0;
    this.pending = 0;
    this.slotReady = false;
  }

  /** Keeps to a shorter context. False: that leaves no room for another token. */
  shorten(contextLength: number): boolean {
    this.limit = Math.min(this.limit, contextLength - this.prompt.length);
    return !this.exhausted;
  }

  tokenRead(): void {
    this.#last = performance.now();
    this.#first ||= this.#last;
  }

  stats(): RequestStats {
    return {
      promptTokens: this.prompt.length,
      cachedTokens: this.cachedTokens,
      completionTokens: this.tokens.length - this.prompt.length,
      ttft: (this.#first || performance.now()) - this.#created,
      decode: this.#last - this.#first,
    };
  }
}
