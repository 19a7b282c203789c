import type { RequestStats } from "../../protocol/messages.js";
import type { FinishReason } from "../../protocol/openai.js";
import type { CachedSequence } from "../cache/sequence-table.js";
import type { HostArray } from "./backend.js";
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
  /** Receives a token of the answer; the end token is not told. Returns false to end the answer here. */
  token(token: number, logprobs: TokenLogprobs | null): boolean;
  /** Receives, from a model that gives embeddings, the state of the last token, not normalized. */
  embedding?(values: Float32Array<ArrayBuffer>): void;
  finish(reason: FinishReason, stats: RequestStats): void;
  fail(error: Error): void;
}

/** Tells before each token of one request which tokens may come next. */
export interface Constraint {
  /**
   * The tokens that may be sampled first, as uint32 [ceil(vocab / 32)]: bit v % 32 of word v / 32 says
   * whether token v may.
   */
  readonly allowed: Uint32Array<ArrayBuffer>;
  /**
   * Takes a sampled token, which is never an end token, and returns the tokens that may follow; null if
   * nothing can follow. A rejection ends this request alone.
   */
  accept(token: number): Promise<Uint32Array<ArrayBuffer> | null>;
  /** Ends the constraint together with its request. */
  close(): void;
}

/** The rows of a prompt whose logits are read, for a request that samples nothing. */
export interface Scored {
  /**
   * How many of `count` rows from position `start` on are computed now, and which of these positions are read,
   * if there are `room` rows of logits.
   */
  rows(start: number, count: number, room: number): readonly [count: number, positions: readonly number[]];
  /** Takes the logits of a position. Returns false if they are not finite. */
  take(position: number, logits: HostArray): boolean;
}

/**
 * The state of one request; the scheduler owns it until the request is done.
 *
 * `tokens` are the prompt and the answer as far as the host knows it; `queued` positions have been given to
 * the device, and `pending` of them end in a sampled token that has not been read yet.
 */
export class Request {
  readonly tokens: number[];
  sequence: CachedSequence | null = null;
  queued = 0;
  pending = 0;
  /** The number of positions whose step the host has read. */
  read = 0;
  done = false;
  /**
   * The tokens that a constrained request may take next; null while that is not known and the request waits.
   */
  allowed: Uint32Array<ArrayBuffer> | null;
  /** Whether the buffers of the request's slot (penalty counts, logit bias) hold its values. */
  slotReady = false;
  cachedTokens = 0;
  /** The number of requests that were admitted before this one since it found no room for its pages. */
  overtaken = 0;
  readonly #created = performance.now();
  #first = 0;
  #last = 0;
  #ended = false;

  constructor(
    readonly prompt: readonly number[],
    readonly params: SamplingParams,
    /** The most tokens that may be generated. */
    public limit: number,
    readonly listener: RequestListener,
    readonly constraint: Constraint | null = null,
    /**
     * If present, the request samples nothing, and keeps its pages when its prompt has been read: until it is
     * cancelled, or others need them.
     */
    readonly scored: Scored | null = null,
  ) {
    this.tokens = [...prompt];
    this.allowed = constraint?.allowed ?? null;
  }

  /** The number of positions to queue before the next token can be sampled. */
  get remaining(): number {
    return this.tokens.length + this.pending - this.queued;
  }

  /** The number of tokens sampled so far, unread ones included. */
  get generated(): number {
    return this.tokens.length + this.pending - this.prompt.length;
  }

  /** Whether the request decodes: its prompt has been read, and one row gives its next token. */
  get decodes(): boolean {
    return this.remaining === 1 && this.generated > 0;
  }

  /** Whether all tokens that may be generated are sampled or in flight. */
  get exhausted(): boolean {
    return this.generated >= this.limit;
  }

  /** Whether a token of the answer has been read. */
  get hasToken(): boolean {
    return this.#first > 0;
  }

  /** Whether the prompt was read for what it shows, so that the request only holds its pages for others. */
  get idle(): boolean {
    return this.scored !== null && this.read === this.tokens.length;
  }

  /** Whether the request waits for the tokens that its constraint allows. */
  get held(): boolean {
    return this.constraint !== null && this.allowed === null;
  }

  /** Resets the request after the device lost its state: it is computed again from its tokens. */
  restart(): void {
    this.sequence = null;
    this.queued = 0;
    this.pending = 0;
    this.slotReady = false;
  }

  /** Limits the request to a shorter context. Returns false if that leaves no room for another token. */
  shorten(contextLength: number): boolean {
    this.limit = Math.min(this.limit, contextLength - this.prompt.length);
    return !this.exhausted;
  }

  tokenRead(): void {
    this.#last = performance.now();
    this.#first ||= this.#last;
  }

  /** Counts the token with which the model ended its answer, although that token is not part of the text. */
  endRead(): void {
    this.#ended = true;
  }

  stats(): RequestStats {
    return {
      promptTokens: this.prompt.length,
      cachedTokens: this.cachedTokens,
      completionTokens: this.tokens.length - this.prompt.length + Number(this.#ended),
      ttft: (this.#first || performance.now()) - this.#created,
      decode: this.#last - this.#first,
    };
  }
}
