import type { RequestStats } from "../../protocol/messages.js";
import type { FinishReason } from "../../protocol/openai.js";
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
  /** Instead of tokens, of a model that gives embeddings: the state of the last token, not normalized. */
  embedding?(values: Float32Array<ArrayBuffer>): void;
  finish(reason: FinishReason, stats: RequestStats): void;
  fail(error: Error): void;
}

/** Says before each token of one request which tokens may come. */
export interface Constraint {
  /**
   * What may be sampled first, as uint32 [ceil(vocab / 32)]: bit v % 32 of word v / 32 says whether token v
   * may.
   */
  readonly allowed: Uint32Array<ArrayBuffer>;
  /**
   * Takes note of a sampled token, which no end token is, and tells what may follow; null: nothing can. A
   * rejection ends the request, and no other.
   */
  accept(token: number): Promise<Uint32Array<ArrayBuffer> | null>;
  /** The request has ended. */
  close(): void;
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
  /** Positions whose step the host has read. */
  read = 0;
  done = false;
  /** What a constrained request may be given next; null until that is known, and it waits. */
  allowed: Uint32Array<ArrayBuffer> | null;
  /** Whether the buffers of its slot (penalty counts, logit bias) hold its values. */
  slotReady = false;
  cachedTokens = 0;
  /** Requests that were admitted before this one since it found no room for its pages. */
  overtaken = 0;
  readonly #created = performance.now();
  #first = 0;
  #last = 0;
  #ended = false;

  constructor(
    readonly prompt: readonly number[],
    readonly params: SamplingParams,
    /** Tokens that may be generated. */
    public limit: number,
    readonly listener: RequestListener,
    readonly constraint: Constraint | null = null,
  ) {
    this.tokens = [...prompt];
    this.allowed = constraint?.allowed ?? null;
  }

  /** Positions to queue before the next token can be sampled. */
  get remaining(): number {
    return this.tokens.length + this.pending - this.queued;
  }

  /** Tokens sampled so far, those still unread included. */
  get generated(): number {
    return this.tokens.length + this.pending - this.prompt.length;
  }

  /** Whether one row gives its next token, and it has given one before: its prompt has been read. */
  get decodes(): boolean {
    return this.remaining === 1 && this.generated > 0;
  }

  /** Whether as many tokens are on their way as may be generated. */
  get exhausted(): boolean {
    return this.generated >= this.limit;
  }

  /** Whether a token of it has been read. */
  get hasToken(): boolean {
    return this.#first > 0;
  }

  /** Whether it waits for what its constraint allows. */
  get held(): boolean {
    return this.constraint !== null && this.allowed === null;
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

  /** The model has written the token that ends its answer: it counts, though it is no part of the text. */
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
