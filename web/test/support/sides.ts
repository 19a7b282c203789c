/**
 * Two sides of one "model" that recites a text, word by word: a device without a GPU, and a cloud as a real
 * HTTP server.
 */

import type { IncomingMessage, ServerResponse } from "node:http";
import { prepareChat } from "../../src/page/requests.js";
import { DeviceError } from "../../src/protocol/errors.js";
import type {
  ChatCompletionChunk,
  ChatCompletionRequest,
  ReadPrompt,
  ReadPromptOptions,
} from "../../src/protocol/openai.js";
import type { DeviceEngine } from "../../src/routing/index.js";
import { LocalCloud } from "./local-cloud.js";

export const WORDS = Array.from({ length: 40 }, (_, index) => `w${index} `);
export const TEXT = WORDS.join("");

interface Asked {
  readonly messages: readonly { readonly role: string; readonly content?: unknown }[];
  readonly max_tokens?: number | null;
  readonly continue_final_message?: boolean | null;
}

/** The remaining words of an answer. */
function rest({ messages, max_tokens, continue_final_message }: Asked): {
  words: string[];
  reason: "stop" | "length";
} {
  const begun = continue_final_message ? String(messages.at(-1)?.content ?? "") : "";
  if (!TEXT.startsWith(begun))
    throw new Error(`asked to continue ${begun}, which is not how the text begins`);
  const left = WORDS.slice(begun.split(" ").length - 1);
  const words = left.slice(0, max_tokens ?? left.length);
  return { words, reason: words.length < left.length ? "length" : "stop" };
}

function chunk(model: string, choices: ChatCompletionChunk["choices"]): ChatCompletionChunk {
  return { id: model, object: "chat.completion.chunk", created: 1, model, choices };
}

function word(text: string, logprob: number | null, most = 0): ChatCompletionChunk["choices"] {
  const other = { token: "?", logprob: -4, bytes: [] };
  const top_logprobs = [{ token: text, logprob: logprob ?? 0, bytes: [] }, other].slice(0, most);
  const content = [{ token: text, logprob: logprob ?? 0, bytes: [], top_logprobs }];
  return [
    {
      index: 0,
      delta: { content: text },
      finish_reason: null,
      logprobs: logprob === null ? null : { content },
    },
  ];
}

/** A device that checks requests as the engine does; its fields set the faults. */
export class FakeDevice implements DeviceEngine {
  readonly model = {
    ...{ name: "near", contextLength: 1000, vocabSize: 3 },
    ...{ checkpoint: "a".repeat(64), quantization: "q4" },
  };
  readonly requests: ChatCompletionRequest[] = [];
  /** Fails with a DeviceError after this many words. */
  failAfter = Number.POSITIVE_INFINITY;
  /** Is silent after this many words. */
  stallAfter = Number.POSITIVE_INFINITY;
  /** From this word on, its log-probabilities are low. */
  unsureFrom = Number.POSITIVE_INFINITY;
  /** Milliseconds before the first word. */
  delay = 0;
  hasLogprobs = true;
  readonly read: ReadPromptOptions[] = [];
  lostMessage = "The GPU device was lost.";
  ended = 0;
  /** Prompts that were read and are still held. */
  held = 0;
  /** How many prompts were held at each piece of an answer. */
  readonly heldAt: number[] = [];

  readonly chat = {
    completions: {
      create: async (request: ChatCompletionRequest & { stream: true }) => {
        this.requests.push(request);
        if (request.logprobs && !this.hasLogprobs)
          throw Object.assign(new Error("none"), { name: "RequestError", param: "logprobs" });
        prepareChat(request, this.model.name);
        return this.#answer(request);
      },
    },
  };

  readPrompt(_: readonly unknown[], options: ReadPromptOptions): Promise<ReadPrompt> {
    this.read.push(options);
    if (!this.hasLogprobs) return Promise.reject(new DeviceError("none"));
    if (this.stallAfter === 0) return new Promise(() => undefined);
    if (options.hold) {
      this.held += 1;
      options.signal?.addEventListener("abort", () => {
        this.held -= 1;
      });
    }
    const logprobs = (options.tokens ?? []).map((token) => -5 - token / 3);
    return Promise.resolve({ prompt_tokens: 10, top: [-0.1, -4], logprobs, prompt_logprob: null });
  }

  countTokens(messages: readonly unknown[]): Promise<number> {
    return Promise.resolve(JSON.stringify(messages).length);
  }

  async *#answer(request: ChatCompletionRequest): AsyncGenerator<ChatCompletionChunk> {
    try {
      const { words, reason } = rest(request);
      yield chunk("near", [
        { index: 0, delta: { role: "assistant", content: "" }, finish_reason: null, logprobs: null },
      ]);
      await new Promise((resolve) => setTimeout(resolve, this.delay));
      for (const [at, text] of words.entries()) {
        if (at >= this.failAfter) throw new DeviceError(this.lostMessage);
        if (at >= this.stallAfter) await new Promise(() => undefined);
        if (request.signal?.aborted) throw new DOMException("aborted", "AbortError");
        this.heldAt.push(this.held);
        const logprob = request.logprobs ? (at >= this.unsureFrom ? -9 : -0.1) : null;
        yield chunk("near", word(text, logprob, request.top_logprobs ?? 0));
      }
      yield chunk("near", [{ index: 0, delta: {}, finish_reason: reason, logprobs: null }]);
      const usage = { prompt_tokens: 10, completion_tokens: words.length, total_tokens: 10 + words.length };
      yield { ...chunk("near", []), usage: { ...usage, prompt_tokens_details: { cached_tokens: 0 } } };
    } finally {
      this.ended += 1;
    }
  }
}

/** A cloud whose fields set the faults; `requests` are the received bodies. */
export class FakeCloud extends LocalCloud {
  readonly requests: (Asked & Record<string, unknown>)[] = [];
  readonly authorizations: (string | undefined)[] = [];
  /** Answers the first `count` requests with this status. */
  refusals: { status: number; headers?: Record<string, string>; count: number } | null = null;
  /** Cuts the connection after this many words, `cuts` times. */
  cutAfter = Number.POSITIVE_INFINITY;
  cuts = 1;
  /** Ends the stream without an error after this many words, which is too early. */
  endAfter = Number.POSITIVE_INFINITY;
  stallAfter = Number.POSITIVE_INFINITY;
  delay = 0;
  aborted = 0;

  protected override async serve(request: IncomingMessage, response: ServerResponse): Promise<void> {
    if (request.url === "/v1/models") {
      response.end(JSON.stringify({ data: [{ id: "far" }] }));
      return;
    }
    const parts: Buffer[] = [];
    for await (const part of request) parts.push(part as Buffer);
    const body = JSON.parse(Buffer.concat(parts).toString()) as Asked & Record<string, unknown>;
    this.requests.push(body);
    this.authorizations.push(request.headers.authorization);
    if (this.refusals && this.refusals.count-- > 0) {
      response.writeHead(this.refusals.status, this.refusals.headers);
      response.end(JSON.stringify({ error: { message: "not now", param: null } }));
      return;
    }
    response.on("close", () => {
      if (!response.writableEnded) this.aborted += 1;
    });
    const { words, reason } = rest(body);
    const say = (value: unknown): boolean => response.write(`data: ${JSON.stringify(value)}\r\n\r\n`);
    response.writeHead(200, { "content-type": "text/event-stream" });
    response.flushHeaders();
    await new Promise((resolve) => setTimeout(resolve, this.delay));
    for (const [at, text] of words.entries()) {
      if (at >= this.stallAfter) return;
      if (at >= this.endAfter) break;
      if (at >= this.cutAfter && this.cuts-- > 0) {
        await new Promise((resolve) => setTimeout(resolve, 20));
        response.socket?.destroy();
        return;
      }
      say(chunk("far", word(text, null)));
    }
    if (this.endAfter === Number.POSITIVE_INFINITY) {
      say(chunk("far", [{ index: 0, delta: {}, finish_reason: reason, logprobs: null }]));
      say({
        ...chunk("far", []),
        usage: { prompt_tokens: 12, completion_tokens: words.length, total_tokens: 0 },
      });
      response.write("data: [DONE]\n\n");
    }
    response.end();
  }
}
