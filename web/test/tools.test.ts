/** Tools on the device, from the request to the reply: the engine, its grammar and its templates are real. */

import { afterAll, beforeAll, describe, expect, test } from "vitest";
import type { ChatCompletionChunk, ChatCompletionRequest } from "../src/protocol/openai.js";
import { createTextCodec } from "../src/worker/text/index.js";
import { callOf, openParrot, type Parrot, says } from "./support/parrot.js";

const WEATHER = {
  type: "function",
  function: {
    name: "weather",
    description: "The weather of a city.",
    parameters: {
      type: "object",
      properties: { city: { type: "string", enum: ["Oslo", "Rome"] } },
      required: ["city"],
      additionalProperties: false,
    },
  },
} as const;
const TIME = { type: "function", function: { name: "time", parameters: { type: "object" } } } as const;
const TOOLS = [WEATHER, TIME];

let parrot: Parrot;
beforeAll(async () => {
  parrot = await openParrot();
});
afterAll(() => parrot.close());

async function ask(answer: string, request: Partial<ChatCompletionRequest> = {}) {
  const messages = [{ role: "user", content: `Weather? ${says(answer)}` }] as const;
  const all = { messages, temperature: 0, max_tokens: 200, ...request };
  const { choices } = await parrot.engine.chat.completions.create({ ...all, stream: false });
  const [choice] = choices;
  if (!choice) throw new Error("no answer");
  return choice;
}

const ID = expect.stringMatching(/^call_[0-9a-f]{24}$/);

describe("tools on the device", () => {
  test("the model says so", () => expect(parrot.engine.model.features).toContain("tools"));

  test("an answer with a call", async () => {
    const { message, finish_reason } = await ask(callOf("weather", { city: "Oslo" }), { tools: TOOLS });
    expect(message).toEqual({
      role: "assistant",
      content: null,
      tool_calls: [
        { id: ID, type: "function", function: { name: "weather", arguments: '{"city": "Oslo"}' } },
      ],
    });
    expect(finish_reason).toBe("tool_calls");
  });

  test("an answer without one, beside which tools change nothing", async () => {
    const { message, finish_reason } = await ask("Sunny.", { tools: TOOLS });
    expect(message).toEqual({ role: "assistant", content: "Sunny." });
    expect(finish_reason).toBe("stop");
  });

  test("streamed: text, then two calls, then the reason", async () => {
    const answer = `Let me see.\n${callOf("weather", { city: "Rome" })}\n${callOf("time", {})}`;
    const chunks: ChatCompletionChunk[] = [];
    const stream = await parrot.engine.chat.completions.create({
      messages: [{ role: "user", content: says(answer) }],
      tools: TOOLS,
      temperature: 0,
      stream: true,
    });
    for await (const chunk of stream) chunks.push(chunk);
    const deltas = chunks.flatMap(({ choices }) => choices.map(({ delta }) => delta));
    expect(deltas.map(({ content }) => content ?? "").join("")).toBe("Let me see.\n");
    expect(deltas.every(({ tool_calls = [] }) => tool_calls.length < 2)).toBe(true);
    const parts = deltas.flatMap(({ tool_calls }) => tool_calls ?? []);
    expect(parts.filter(({ id }) => id)).toEqual([
      { index: 0, id: ID, type: "function", function: { name: "weather", arguments: "" } },
      { index: 1, id: ID, type: "function", function: { name: "time", arguments: "" } },
    ]);
    const written = [0, 1].map((index) => parts.filter((part) => part.index === index).slice(1));
    const pieces = written.map((of) => of.map((part) => part.function?.arguments ?? ""));
    expect(pieces.map((of) => of.join(""))).toEqual(['{"city": "Rome"}', "{}"]);
    expect(pieces[0]?.length).toBeGreaterThan(5);
    expect(chunks.at(-1)?.choices[0]?.finish_reason).toBe("tool_calls");
    expect(deltas.filter(({ content }) => content).length).toBeGreaterThan(5);
  });

  test("what the model wants to write, and must not, it cannot write", async () => {
    const wrong = await ask(callOf("weather", { city: "Olso" }), { tools: TOOLS });
    expect(JSON.parse(wrong.message.tool_calls?.[0]?.function.arguments ?? "")).toEqual({
      city: expect.stringMatching(/^(Oslo|Rome)$/),
    });
    // Required calls may come after reasoning, but this model would never end its reasoning.
    const begun = "<tool_call>No.";
    const { message, finish_reason } = await ask(begun, {
      tools: [WEATHER],
      tool_choice: "required",
      parallel_tool_calls: false,
    });
    expect(message.tool_calls).toMatchObject([{ function: { name: "weather" } }]);
    expect(finish_reason).toBe("tool_calls");
    const choice = { type: "function", function: { name: "time" } } as const;
    const named = await ask(begun, { tools: TOOLS, tool_choice: choice });
    expect(named.message.tool_calls).toMatchObject([{ function: { name: "time" } }]);
    const single = { tools: TOOLS, tool_choice: "required", parallel_tool_calls: false } as const;
    const one = await ask(`${callOf("time", {})}\n${callOf("time", {})}`, single);
    expect(one.message.tool_calls).toHaveLength(1);
  });

  test("results go back to the model, and reasoning stands apart", async () => {
    const first = await ask(`<think>Where?</think>\n\n${callOf("weather", { city: "Oslo" })}`, {
      tools: TOOLS,
    });
    expect(first.message).toMatchObject({ content: null, reasoning_content: "Where?" });
    const [call] = first.message.tool_calls ?? [];
    const second = await ask("", {
      tools: TOOLS,
      messages: [
        { role: "user", content: "Weather?" },
        first.message,
        { role: "tool", tool_call_id: call?.id ?? "", content: `rain ${says("Rain in Oslo.")}` },
      ],
    });
    expect(second).toMatchObject({ message: { content: "Rain in Oslo." }, finish_reason: "stop" });
    const plain = await ask("<think>Hm.</think>So.");
    expect(plain.message).toEqual({ role: "assistant", content: "So.", reasoning_content: "Hm." });
  });

  test("a call that is cut has the members that are there", async () => {
    const { message, finish_reason } = await ask(callOf("weather", { city: "Oslo" }), {
      tools: TOOLS,
      max_tokens: 52,
    });
    expect(finish_reason).toBe("length");
    expect(message.tool_calls).toMatchObject([{ function: { name: "weather" } }]);
  });

  test("with none, calls are text; with a format, either comes", async () => {
    const written = callOf("time", {});
    const none = await ask(written, { tools: TOOLS, tool_choice: "none" });
    expect(none).toMatchObject({ message: { content: written }, finish_reason: "stop" });
    const response_format = {
      type: "json_schema",
      json_schema: { name: "a", schema: { type: "integer" } },
    } as const;
    expect((await ask("42", { tools: TOOLS, response_format })).message.content).toBe("42");
    const called = await ask(written, { tools: TOOLS, response_format });
    expect(called.message.tool_calls).toMatchObject([{ function: { name: "time" } }]);
  });

  test("a schema that cannot be enforced is refused by name", async () => {
    const bad = { name: "odd", strict: true, parameters: { type: "object", not: {} } };
    const asked = ask("No.", { tools: [{ type: "function", function: bad }] });
    await expect(asked).rejects.toMatchObject({ name: "RequestError", param: "tools" });
  });

  test("tools count as tokens of the prompt", async () => {
    const messages = [{ role: "user", content: says("Yes.") }] as const;
    const create = async (more: Partial<ChatCompletionRequest>): Promise<number> =>
      (await parrot.engine.chat.completions.create({ messages, ...more, stream: false })).usage.prompt_tokens;
    const [without, withTools] = [await create({}), await create({ tools: TOOLS })];
    expect(await parrot.engine.countTokens(messages)).toBe(without);
    expect(await parrot.engine.countTokens(messages, { tools: TOOLS })).toBe(withTools);
    expect(withTools).toBeGreaterThan(without + 100);
  });
});

test("special tokens that are marks are text in chats, and in nothing else", () => {
  const special = (id: number, content: string) => ({
    ...{ id, content, special: true, single_word: false, lstrip: false, rstrip: false, normalized: false },
  });
  const vocab = { "<s>": 0, a: 1, "<|call|>": 2 };
  const tokenizerJson = {
    ...{ version: "1.0", normalizer: null, pre_tokenizer: null, post_processor: null },
    added_tokens: [special(0, "<s>"), special(2, "<|call|>")],
    decoder: { type: "Fuse" },
    model: { type: "BPE", vocab, merges: [], unk_token: null, byte_fallback: false, fuse_unk: false },
  };
  const codec = createTextCodec(
    { tokenizerJson, tokenizerConfig: {} },
    { bosTokenId: 0, eosTokenIds: [], answers: { dropped: ["<|call|>to"] } },
  );
  const text = (withMarks: boolean): string => {
    const stream = codec.stream([], [], withMarks);
    return [0, 1, 2].map((id) => stream.push(id).text).join("") + stream.flush();
  };
  expect([text(false), text(true)]).toEqual(["a", "a<|call|>"]);
  expect([codec.tokenBytes(0), codec.tokenBytes(2)?.length]).toEqual([null, 8]);
});

test("a template that knows no tools has them in words", async () => {
  const other = await openParrot(
    "{% for message in messages %}{{ message.role }}: {{ message.content }} {% endfor %}assistant:@",
  );
  const { choices } = await other.engine.chat.completions.create({
    messages: [{ role: "user", content: says(callOf("time", {})) }],
    tools: TOOLS,
    temperature: 0,
    logprobs: false,
  });
  expect(choices[0]?.message.tool_calls).toMatchObject([{ function: { name: "time" } }]);
  const counted = await other.engine.countTokens([{ role: "user", content: "a" }], { tools: TOOLS });
  expect(counted).toBeGreaterThan(200);
  await other.close();
});

test("an artifact that does not say how its model calls refuses tools", async () => {
  const other = await openParrot(undefined, null);
  expect(other.engine.model.features).not.toContain("tools");
  const messages = [{ role: "user", content: says("Hi") }] as const;
  await expect(other.engine.chat.completions.create({ messages, tools: TOOLS })).rejects.toMatchObject({
    param: "tools",
    code: "unsupported",
  });
  await other.close();
});
