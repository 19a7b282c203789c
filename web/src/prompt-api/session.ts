import { streamedChat } from "../protocol/answerer.js";
import { addCall } from "../protocol/calls.js";
import type { ChatMessage, ToolCall } from "../protocol/openai.js";
import { streamOf } from "../protocol/streams.js";
import type { PromptEngine } from "./model.js";
import { formatOf, messagesOf, type Sampling } from "./options.js";
import { called, MOST_ROUNDS, toolsAsked } from "./tools.js";
import type { LanguageModelSession, LanguageModelTool, PromptInput, PromptOptions } from "./types.js";

/** A conversation. A prompt waits for the earlier ones. */
export class Session extends EventTarget implements LanguageModelSession {
  oncontextoverflow: ((event: Event) => void) | null = null;
  onquotaoverflow: ((event: Event) => void) | null = null;
  readonly #ended = new AbortController();
  /** The conversation after the initial prompts; the oldest turns are dropped when there is no room. */
  #history: readonly ChatMessage[] = [];
  #usage = 0;
  #last: Promise<unknown> = Promise.resolve();

  constructor(
    private readonly engine: PromptEngine,
    private readonly sampling: Sampling,
    private readonly initial: readonly ChatMessage[],
    private readonly tools: readonly LanguageModelTool[],
  ) {
    super();
  }

  get contextUsage(): number {
    return this.#usage;
  }
  get contextWindow(): number {
    return this.engine.model.contextLength;
  }
  get inputUsage(): number {
    return this.contextUsage;
  }
  get inputQuota(): number {
    return this.contextWindow;
  }
  get temperature(): number | null {
    return this.sampling.temperature ?? null;
  }
  get topK(): number | null {
    return this.sampling.top_k ?? null;
  }

  async prompt(input: PromptInput, options: PromptOptions = {}): Promise<string> {
    let text = "";
    for await (const piece of this.#answer(input, options)) text += piece;
    return text;
  }

  promptStreaming(input: PromptInput, options: PromptOptions = {}): ReadableStream<string> {
    return streamOf(this.#answer(input, options));
  }

  async append(input: PromptInput, { signal }: { readonly signal?: AbortSignal } = {}): Promise<undefined> {
    const { messages } = messagesOf(input);
    const turn = await this.#turn(signal);
    try {
      const kept = await this.#room(messages);
      turn.signal.throwIfAborted();
      this.#history = [...kept, ...messages];
      await this.measure();
    } finally {
      turn.over();
    }
  }

  async measureContextUsage(input: PromptInput, { signal }: PromptOptions = {}): Promise<number> {
    signal?.throwIfAborted();
    this.#ended.signal.throwIfAborted();
    const { messages } = messagesOf(input);
    return (await this.#count([...this.#history, ...messages])) - this.#usage;
  }

  measureInputUsage(input: PromptInput, options: PromptOptions = {}): Promise<number> {
    return this.measureContextUsage(input, options);
  }

  async clone({ signal }: { readonly signal?: AbortSignal } = {}): Promise<LanguageModelSession> {
    signal?.throwIfAborted();
    this.#ended.signal.throwIfAborted();
    const other = new Session(this.engine, this.sampling, this.initial, this.tools);
    other.#history = this.#history;
    other.#usage = this.#usage;
    signal?.addEventListener("abort", () => other.destroy(), { once: true });
    return other;
  }

  destroy(): undefined {
    this.#ended.abort(new DOMException("The session was destroyed. Create or clone another.", "AbortError"));
  }

  /**
   * Counts the tokens of the conversation. Throws QuotaExceededError if the initial prompts alone are too
   * long.
   */
  async measure(): Promise<void> {
    const tokens = await this.#count(this.#history);
    if (tokens >= this.contextWindow && this.#history.length === 0) throw this.#tooLong(tokens);
    this.#usage = tokens;
  }

  async *#answer(input: PromptInput, options: PromptOptions): AsyncGenerator<string> {
    const asked = messagesOf(input);
    const format = formatOf(options);
    const turn = await this.#turn(options.signal);
    try {
      const kept = await this.#room(asked.messages);
      turn.signal.throwIfAborted();
      let conversation = [...kept, ...asked.messages];
      let { isPrefix } = asked;
      for (let round = 0; ; round++) {
        const chunks = await streamedChat(this.engine, {
          ...this.sampling,
          ...format,
          ...toolsAsked(this.tools),
          ...(isPrefix && { continue_final_message: true }),
          messages: [...this.initial, ...conversation],
          signal: turn.signal,
        });
        let answer = "";
        const written: ToolCall[] = [];
        let calls: readonly ToolCall[] = [];
        for await (const { choices } of chunks) {
          const { content, tool_calls = [] } = choices[0]?.delta ?? {};
          for (const call of tool_calls) addCall(written, call);
          // The calls of an answer that was cut are not made.
          if (choices[0]?.finish_reason === "tool_calls") calls = written;
          if (!content) continue;
          answer += content;
          yield content;
        }
        conversation = answered(conversation, isPrefix, answer, calls);
        if (calls.length === 0) break;
        if (round === MOST_ROUNDS)
          throw new DOMException(`The model called tools ${MOST_ROUNDS} times in a row.`, "OperationError");
        conversation.push(...(await unlessAborted(called(this.tools, calls), turn.signal)));
        isPrefix = false;
      }
      this.#history = conversation;
      await this.measure();
    } catch (error) {
      turn.signal.throwIfAborted();
      throw error;
    } finally {
      turn.over();
    }
  }

  /**
   * Waits for the earlier prompts. The returned signal aborts with the caller's signal and with the session.
   */
  async #turn(signal: AbortSignal | undefined): Promise<{ readonly signal: AbortSignal; over(): void }> {
    const controller = new AbortController();
    const sources = [this.#ended.signal, ...(signal ? [signal] : [])];
    const unlink = sources.map((source) => {
      const abort = (): void => controller.abort(source.reason);
      if (source.aborted) abort();
      source.addEventListener("abort", abort, { once: true });
      return () => source.removeEventListener("abort", abort);
    });
    let finish = (): void => undefined;
    const mine = new Promise<void>((resolve) => {
      finish = resolve;
    });
    const before = this.#last;
    this.#last = before.then(() => mine);
    const over = (): void => {
      for (const each of unlink) each();
      finish();
    };
    try {
      await unlessAborted(before, controller.signal);
    } catch (reason) {
      over();
      throw reason;
    }
    return { signal: controller.signal, over };
  }

  /** Returns the part of the history that fits together with `messages`: whole turns, the oldest left out first. */
  async #room(messages: readonly ChatMessage[]): Promise<readonly ChatMessage[]> {
    let kept = this.#history;
    for (;;) {
      const tokens = await this.#count([...kept, ...messages]);
      if (tokens < this.contextWindow) break;
      if (kept.length === 0) throw this.#tooLong(tokens);
      const next = kept.findIndex(({ role }, at) => at > 0 && role === "user");
      kept = next < 0 ? [] : kept.slice(next);
    }
    if (kept !== this.#history) this.#overflow();
    return kept;
  }

  #overflow(): void {
    for (const name of ["contextoverflow", "quotaoverflow"] as const) {
      const event = new Event(name);
      this[`on${name}`]?.(event);
      this.dispatchEvent(event);
    }
  }

  async #count(after: readonly ChatMessage[]): Promise<number> {
    const messages = [...this.initial, ...after];
    return messages.length === 0 ? 0 : this.engine.countTokens(messages, toolsAsked(this.tools));
  }

  #tooLong(requested: number): DOMException {
    const message =
      `This takes ${requested} tokens, and the model's context has ${this.contextWindow}, answer included. ` +
      "Shorten it.";
    return Object.assign(new DOMException(message, "QuotaExceededError"), {
      requested,
      quota: this.contextWindow,
    });
  }
}

/** Waits for `promise` at most until the signal aborts. */
function unlessAborted<T>(promise: Promise<T>, signal: AbortSignal): Promise<T> {
  return new Promise((resolve, reject) => {
    const abort = (): void => reject(signal.reason);
    if (signal.aborted) abort();
    signal.addEventListener("abort", abort, { once: true });
    promise.then(resolve, reject).finally(() => signal.removeEventListener("abort", abort));
  });
}

/** The conversation with the answer added; an answer that continues a prefix is joined with it. */
function answered(
  messages: readonly ChatMessage[],
  isPrefix: boolean,
  answer: string,
  calls: readonly ToolCall[],
): ChatMessage[] {
  const last = messages.at(-1);
  const called = calls.length > 0 && { tool_calls: calls };
  if (!isPrefix || !last) return [...messages, { role: "assistant", content: answer, ...called }];
  return [...messages.slice(0, -1), { ...last, content: last.content + answer, ...called }];
}
