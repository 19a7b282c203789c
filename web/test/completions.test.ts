import { describe, expect, test, vi } from "vitest";
import { Channel } from "../src/page/channel.js";
import { Completions } from "../src/page/completions.js";
import { CHAT } from "../src/page/replies.js";
import { prepareChat } from "../src/page/requests.js";
import { RequestError, toErrorRecord } from "../src/protocol/errors.js";
import type { AnswerEvent, GenerateRequest } from "../src/protocol/messages.js";
import type { ChatCompletion, ChatCompletionChunk, ChatCompletionRequest } from "../src/protocol/openai.js";
import { Answer } from "../src/worker/session/answer.js";
import { createTextCodec } from "../src/worker/text/index.js";

const STATS = { promptTokens: 5, cachedTokens: 2, completionTokens: 3, ttft: 1, decode: 2 };
const SCORE = { token: "é", logprob: -0.5, offset: 3, top: [{ token: "e", logprob: -1 }] };

class FakeSource {
  readonly requests: GenerateRequest[] = [];
  aborted = 0;

  constructor(private readonly events: readonly AnswerEvent[]) {}

  generate(request: GenerateRequest) {
    // Fails like postMessage for values that cannot be sent.
    this.requests.push(structuredClone(request));
    const events = new Channel<AnswerEvent>();
    for (const event of this.events) events.put(event);
    const abort = (): void => {
      this.aborted += 1;
    };
    return { events, abort };
  }
}

function completions(
  source: FakeSource,
): Completions<ChatCompletionRequest, ChatCompletionChunk, ChatCompletion> {
  return new Completions(source, "sample", "chatcmpl", CHAT, (request) => prepareChat(request, "sample"));
}

const MESSAGES = [{ role: "user", content: "hi" }] as const;
const ANSWER: AnswerEvent[] = [
  { event: "accepted" },
  { event: "delta", index: 0, text: "caf", score: null },
  { event: "delta", index: 0, text: "é", score: SCORE },
  { event: "finish", index: 0, text: "!", reason: "stop" },
  { event: "end", stats: STATS },
];

describe("completions", () => {
  test("come as a whole", async () => {
    const source = new FakeSource(ANSWER);
    const reply = await completions(source).create({
      messages: MESSAGES,
      seed: 3n,
      signal: AbortSignal.timeout(9999),
    });
    expect(reply).toMatchObject({
      object: "chat.completion",
      model: "sample",
      choices: [{ index: 0, message: { role: "assistant", content: "café!" }, finish_reason: "stop" }],
      usage: {
        prompt_tokens: 5,
        completion_tokens: 3,
        total_tokens: 8,
        prompt_tokens_details: { cached_tokens: 2 },
      },
    });
    expect(reply.choices[0]?.logprobs?.content[0]).toMatchObject({ token: "é", bytes: [0xc3, 0xa9] });
    expect(source.requests[0]?.options).toMatchObject({ seed: 3n });
  });

  test("come as chunks", async () => {
    const stream = await completions(new FakeSource(ANSWER)).create({
      messages: MESSAGES,
      stream: true,
      stream_options: { include_usage: true },
    });
    const chunks: ChatCompletionChunk[] = [];
    for await (const chunk of stream) chunks.push(chunk);
    expect(chunks.map(({ choices }) => choices[0]?.delta.content)).toEqual([
      "",
      "caf",
      "é",
      "!",
      undefined,
      undefined,
    ]);
    expect(chunks.map(({ choices }) => choices[0]?.finish_reason)).toEqual([
      null,
      null,
      null,
      null,
      "stop",
      undefined,
    ]);
    expect(chunks.at(-1)?.usage?.total_tokens).toBe(8);
    expect(new Set(chunks.map(({ id }) => id)).size).toBe(1);
  });

  test("that are left before the first is read end the answer", async () => {
    for (const how of ["return", "throw"] as const) {
      const source = new FakeSource(ANSWER);
      const stream = await completions(source).create({ messages: MESSAGES, stream: true });
      await (stream as AsyncGenerator)[how](undefined).catch(() => undefined);
      expect(source.aborted).toBe(1);
      const rest: unknown[] = [];
      for await (const chunk of stream) rest.push(chunk);
      expect(rest).toEqual([]);
    }
  });

  test("leave no listener at their signal, whether answered or refused", async () => {
    const { signal } = new AbortController();
    const add = vi.spyOn(signal, "addEventListener");
    const remove = vi.spyOn(signal, "removeEventListener");
    const error = toErrorRecord(new RequestError("too long", "messages"));
    for (const events of [ANSWER, [{ event: "error" as const, error }]]) {
      const asked = completions(new FakeSource(events)).create({ messages: MESSAGES, signal });
      await asked.catch(() => undefined);
    }
    expect(add).toHaveBeenCalledTimes(2);
    expect(remove).toHaveBeenCalledTimes(2);
  });

  test("of several choices keep them apart", async () => {
    const events: AnswerEvent[] = [
      { event: "accepted" },
      { event: "delta", index: 1, text: "b", score: null },
      { event: "delta", index: 0, text: "a", score: null },
      { event: "finish", index: 1, text: "", reason: "length" },
      { event: "finish", index: 0, text: "", reason: "stop" },
      { event: "end", stats: STATS },
    ];
    const reply = await completions(new FakeSource(events)).create({ messages: MESSAGES, n: 2 });
    expect(reply.choices.map(({ message, finish_reason }) => [message.content, finish_reason])).toEqual([
      ["a", "stop"],
      ["b", "length"],
    ]);
  });

  test("that are refused reject create, streaming too", async () => {
    const error = toErrorRecord(new RequestError("temperature must be …", "temperature"));
    const create = completions(new FakeSource([{ event: "error", error }])).create({
      messages: MESSAGES,
      stream: true,
    });
    await expect(create).rejects.toMatchObject({ name: "RequestError", param: "temperature" });
  });

  test("end when the loop is left, and when the signal says so", async () => {
    const source = new FakeSource(ANSWER.slice(0, 2));
    for await (const chunk of await completions(source).create({ messages: MESSAGES, stream: true }))
      if (chunk.choices[0]?.delta.content === "caf") break;
    expect(source.aborted).toBe(1);
    const controller = new AbortController();
    const whole = completions(source).create({ messages: MESSAGES, signal: controller.signal });
    setTimeout(() => controller.abort(), 5);
    await expect(whole).rejects.toMatchObject({ name: "AbortError" });
    expect(source.aborted).toBeGreaterThan(1);
    const late = completions(source).create({ messages: MESSAGES, signal: controller.signal });
    await expect(late).rejects.toMatchObject({ name: "AbortError" });
  });
});

test("text_offset counts characters, however many tokens they have", () => {
  const bytes = [..."日本a"].flatMap((char) => [...new TextEncoder().encode(char)]);
  const name = (byte: number): string => `<0x${byte.toString(16).toUpperCase().padStart(2, "0")}>`;
  const vocab = Object.fromEntries([
    ["<s>", 0],
    ...[...new Set(bytes)].map((byte, at) => [name(byte), at + 1]),
  ]);
  const tokenizerJson = {
    ...{ version: "1.0", normalizer: null, pre_tokenizer: null, post_processor: null },
    added_tokens: [
      {
        id: 0,
        content: "<s>",
        special: true,
        single_word: false,
        lstrip: false,
        rstrip: false,
        normalized: false,
      },
    ],
    decoder: { type: "Sequence", decoders: [{ type: "ByteFallback" }, { type: "Fuse" }] },
    model: { type: "BPE", vocab, merges: [], unk_token: null, byte_fallback: true, fuse_unk: false },
  };
  const codec = createTextCodec({ tokenizerJson, tokenizerConfig: {} }, { bosTokenId: 0, eosTokenIds: [] });
  const offsets: (number | null)[] = [];
  const asked = {
    tokens: [],
    end: "",
    opened: false,
    echo: "é😀",
    grammar: null,
    stream: () => codec.stream([]),
    reader: () => null,
  };
  const answer = new Answer(
    codec,
    asked,
    1,
    (event) => {
      if (event.event === "delta") offsets.push(event.score?.offset ?? null);
    },
    () => undefined,
  );
  const choice = answer.choice(0);
  const tokens = [0, ...bytes.map((byte) => Number(vocab[name(byte)]))];
  for (const token of tokens) choice.token(token, { logprob: 0, top: [] });
  expect(offsets).toEqual([2, 2, 2, 2, 3, 3, 3, 4]);
});
