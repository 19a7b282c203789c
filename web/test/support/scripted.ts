/** Sides that play the events of the hand-over: each request for an answer gets the next part. */

import type { IncomingMessage, ServerResponse } from "node:http";
import { DeviceError, RequestError } from "../../src/protocol/errors.js";
import type { ChatCompletionChunk, ChatCompletionRequest } from "../../src/protocol/openai.js";
import type { DeviceEngine } from "../../src/routing/index.js";
import { LocalCloud } from "./local-cloud.js";

type Json = Readonly<Record<string, unknown>>;

/** The chunks of a piece's line. */
function chunksOf(words: readonly string[]): Json[] {
  const [, , count, ...more] = words;
  const call = { index: 0, id: "t", type: "function", function: { name: "go", arguments: "{}" } };
  const delta = more.includes("calls") ? { tool_calls: [call] } : { content: "x " };
  const choices = Array.from({ length: Number(count) }, () => ({
    index: 0,
    delta,
    finish_reason: null as string | null,
  }));
  const finish = more.find((word) => word.startsWith("="))?.slice(1);
  const all = finish ? [...choices, { index: 0, delta: {}, finish_reason: finish }] : choices;
  return all.map((choice) => ({
    id: "x",
    object: "chat.completion.chunk",
    created: 1,
    model: "m",
    choices: [choice],
  }));
}

export class ScriptedDevice implements DeviceEngine {
  readonly model = { name: "near", contextLength: 999 };
  readonly chat = {
    completions: {
      create: (
        request: ChatCompletionRequest & { stream: true },
      ): Promise<AsyncIterable<ChatCompletionChunk>> => {
        const part = this.#parts.shift() ?? ["failed device lost"];
        const [first = "", , param] = part[0]?.split(" ") ?? [];
        if (first === "refused") return Promise.reject(new RequestError("not this", param ?? null));
        return Promise.resolve(this.#play(part, request));
      },
    },
  };
  readonly #parts: string[][];

  constructor(parts: readonly (readonly string[])[]) {
    this.#parts = parts.map((part) => [...part]);
  }

  get left(): number {
    return this.#parts.length;
  }

  async *#play(part: readonly string[], _: ChatCompletionRequest): AsyncGenerator<ChatCompletionChunk> {
    for (const words of part.map((line) => line.split(" "))) {
      const [kind, , code] = words;
      if (kind === "piece") yield* chunksOf(words) as unknown as ChatCompletionChunk[];
      if (kind === "refused") throw new RequestError("not this", code ?? null);
      if (code === "stalled") await new Promise(() => undefined);
      if (kind === "failed") throw new DeviceError("The GPU device was lost.");
      if (kind === "ended") return;
    }
  }
}

export class ScriptedCloud extends LocalCloud {
  readonly #parts: string[][];

  constructor(parts: readonly (readonly string[])[]) {
    super();
    this.#parts = parts.map((part) => [...part]);
  }

  get left(): number {
    return this.#parts.length;
  }

  protected override async serve(request: IncomingMessage, response: ServerResponse): Promise<void> {
    for await (const _ of request);
    const part = this.#parts.shift() ?? ["failed cloud 599"];
    const [kind, , code = ""] = part[0]?.split(" ") ?? [];
    const status = kind === "refused" ? 400 : kind === "failed" ? Number(code) : Number.NaN;
    if (Number.isFinite(status)) {
      response.writeHead(status);
      response.end(JSON.stringify({ error: { message: "not now", param: code } }));
      return;
    }
    response.writeHead(200, { "content-type": "text/event-stream" });
    response.flushHeaders();
    for (const words of part.map((line) => line.split(" "))) await this.#play(response, words);
  }

  async #play(response: ServerResponse, words: readonly string[]): Promise<void> {
    const say = (data: string): boolean => response.write(`data: ${data}\n\n`);
    const [kind, , code] = words;
    if (kind === "piece") for (const chunk of chunksOf(words)) say(JSON.stringify(chunk));
    else if (kind === "ended") {
      say("[DONE]");
      response.end();
    } else if (code === "error") say(JSON.stringify({ error: { message: "overloaded" } }));
    else if (code === "shape") say("not json");
    else if (code !== "timeout") {
      // Earlier bytes are sent first.
      await new Promise((resolve) => setTimeout(resolve, 30));
      response.socket?.destroy();
    }
  }
}
