import { abortReason, fromErrorRecord, throwIfAborted } from "../protocol/errors.js";
import { type AnswerEvent, type CallPart, type GenerateRequest, hasMore } from "../protocol/messages.js";
import type { ChatCompletionRequest, RequestOptions, ToolCall } from "../protocol/openai.js";
import type { Channel } from "./channel.js";
import { type ReplyHead, type ReplyShape, usageOf, type WholeChoice } from "./replies.js";

/** The part of the engine that `create` uses. */
export interface AnswerSource {
  generate(request: GenerateRequest): { readonly events: Channel<AnswerEvent>; readonly abort: () => void };
}

/** A parsed request: the message to the worker without the number of choices. */
export interface Prepared extends Pick<GenerateRequest, "prompt" | "logprobs" | "grammar"> {
  readonly options: RequestOptions;
  /** Number of messages that the context policy left out. */
  readonly leftOut?: number;
}

interface Answering {
  readonly head: ReplyHead;
  readonly n: number;
  readonly leftOut: number;
  readonly next: () => Promise<AnswerEvent>;
  readonly abort: () => void;
}

/** One of OpenAI's two endpoints. */
export class Completions<Req extends RequestOptions & { stream?: boolean | null }, Chunk, Whole> {
  constructor(
    private readonly source: AnswerSource,
    private readonly model: string,
    private readonly idPrefix: string,
    private readonly shape: ReplyShape<Chunk, Whole>,
    private readonly prepare: (request: Req) => Prepared | Promise<Prepared>,
  ) {}

  /**
   * Answers a request: as a whole, or with `stream: true` as chunks. Leaving the loop over the chunks ends
   * the answer.
   *
   * @throws RequestError naming the wrong parameter, DeviceError, or the reason of `signal` when that says so.
   */
  create(request: Req & { stream: true }): Promise<AsyncIterable<Chunk>>;
  create(request: Req & { stream?: false | null }): Promise<Whole>;
  create(request: Req): Promise<AsyncIterable<Chunk> | Whole>;
  async create(request: Req): Promise<AsyncIterable<Chunk> | Whole> {
    const answering = await this.#start(request);
    if (request.stream) return this.#stream(answering, request.stream_options?.include_usage ?? false);
    return this.#whole(answering);
  }

  /**
   * Returns the chunks, which may be left before the first is read: a generator that has not begun ends
   * nothing.
   */
  #stream(answering: Answering, includeUsage: boolean): AsyncGenerator<Chunk> {
    let begun = false;
    const chunks = this.#chunks(answering, includeUsage, () => {
      begun = true;
    });
    const leave = chunks.return.bind(chunks);
    const fail = chunks.throw.bind(chunks);
    const end = (): void => {
      if (!begun) answering.abort();
    };
    return Object.assign(chunks, {
      return: (value: unknown) => {
        end();
        return leave(value);
      },
      throw: (error: unknown) => {
        end();
        return fail(error);
      },
    });
  }

  async #start(request: Req): Promise<Answering> {
    const prepared = this.prepare(request);
    // This function is synchronous where possible, so that the first request reaches the worker first.
    const {
      prompt,
      logprobs,
      options,
      grammar,
      leftOut = 0,
    } = prepared instanceof Promise ? await prepared : prepared;
    const { signal } = request;
    throwIfAborted(signal);
    const n = request.n ?? 1;
    const { events, abort: stop } = this.source.generate({
      prompt,
      logprobs,
      n,
      options: cloneable(options),
      ...(grammar && { grammar }),
    });
    // One listener for the whole answer: it ends the pending wait.
    let interrupt = (): void => undefined;
    const onAbort = (): void => {
      stop();
      interrupt();
    };
    signal?.addEventListener("abort", onAbort, { once: true });
    const abort = (): void => {
      signal?.removeEventListener("abort", onAbort);
      stop();
    };
    const next = async (): Promise<AnswerEvent> => {
      const event = await new Promise<AnswerEvent>((resolve, reject) => {
        interrupt = () => reject(abortReason(signal));
        if (signal?.aborted) interrupt();
        else events.take().then(resolve, reject);
      });
      if (event.event === "error") throw fromErrorRecord(event.error);
      return event;
    };
    // The worker first accepts or rejects, so that a bad request rejects `create` and not the loop over its
    // chunks.
    try {
      await next();
    } catch (error) {
      abort();
      throw error;
    }
    const id = `${this.idPrefix}-${crypto.randomUUID()}`;
    const head = { id, created: Math.floor(Date.now() / 1000), model: this.model };
    return { head, n, leftOut, next, abort };
  }

  async *#chunks(
    { head, n, leftOut, next, abort }: Answering,
    includeUsage: boolean,
    onBegin: () => void,
  ): AsyncGenerator<Chunk> {
    onBegin();
    const shape = this.shape;
    try {
      for (let index = 0; index < n; index++) {
        const opening = shape.opening(head, index);
        if (opening) yield opening;
      }
      for (;;) {
        const event = await next();
        if (event.event === "delta") yield shape.delta(head, event.index, event, event.score);
        if (event.event === "finish") {
          if (hasMore(event)) yield shape.delta(head, event.index, event, null);
          yield shape.finish(head, event.index, event.reason);
        }
        if (event.event !== "end") continue;
        if (includeUsage) yield shape.usage(head, usageOf(event.stats, leftOut));
        return;
      }
    } finally {
      abort();
    }
  }

  async #whole({ head, n, leftOut, next, abort }: Answering): Promise<Whole> {
    const choices = Array.from({ length: n }, emptyChoice);
    try {
      for (;;) {
        const event = await next();
        if (event.event === "end") return this.shape.whole(head, choices, usageOf(event.stats, leftOut));
        if (!("index" in event)) continue;
        const choice = choices[event.index];
        if (!choice) continue;
        choice.text += event.text;
        choice.reasoning += event.reasoning ?? "";
        if (event.call) addPart(choice.calls, event.call);
        if (event.event === "finish") choice.reason = event.reason;
        else if (event.score) choice.scores.push(event.score);
      }
    } finally {
      abort();
    }
  }
}

/** Adds a part. `addCall` accepts what any server sends, and would be a separate file. */
function addPart(calls: ToolCall[], { index, ...part }: CallPart): void {
  const call = calls[index];
  if (call) call.function.arguments += part.function.arguments;
  else if ("id" in part) calls.push(part);
}

function emptyChoice(): WholeChoice {
  return { text: "", reasoning: "", calls: [], scores: [], reason: "stop" };
}

/** The options for the worker, without those that stay on the page (an AbortSignal cannot be sent). */
function cloneable(
  options: RequestOptions & Pick<ChatCompletionRequest, "stream" | "context_policy">,
): GenerateRequest["options"] {
  const { signal: _signal, n: _n, stream: _stream, stream_options: _streamOptions, ...sampling } = options;
  const { model: _model, user: _user, context_policy: _policy, stop, logit_bias, ...rest } = sampling;
  // The value is copied, because a framework that watches its objects gives proxies, which cannot be sent.
  return {
    ...rest,
    ...(stop != null && { stop: typeof stop === "string" ? stop : [...stop] }),
    ...(logit_bias && { logit_bias: { ...logit_bias } }),
  };
}
