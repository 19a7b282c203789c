/** Requests of web apps in JavaScript, without types: no field is ignored. */

import { describe, expect, test } from "vitest";
import { Engine, WorkerLink } from "../src/page/client.js";
import { RequestError } from "../src/protocol/errors.js";
import type { FromWorker, GenerateRequest, ToWorker } from "../src/protocol/messages.js";
import type { ChatCompletionRequest, CompletionRequest, MessageParam } from "../src/protocol/openai.js";
import { CARD, STATS } from "./support/card.js";

/** A worker that answers "hi" to everything; messages are copied as postMessage copies them. */
class FakeWorker extends EventTarget {
  readonly asked: GenerateRequest[] = [];
  readonly counted: ToWorker[] = [];

  postMessage(message: ToWorker): void {
    const copy = structuredClone(message);
    if (copy.type === "count") {
      this.counted.push(copy);
      this.#say({ type: "counted", id: copy.id, tokens: 1 });
    }
    if (copy.type !== "generate") return;
    const { id } = copy;
    this.asked.push(copy.request);
    this.#say({ type: "answer", id, answer: { event: "accepted" } });
    this.#say({ type: "answer", id, answer: { event: "finish", index: 0, text: "hi", reason: "stop" } });
    this.#say({ type: "answer", id, answer: { event: "end", stats: STATS } });
  }

  terminate(): void {}

  #say(data: FromWorker): void {
    this.dispatchEvent(new MessageEvent("message", { data }));
  }
}

function engine(): { worker: FakeWorker; engine: Engine } {
  const worker = new FakeWorker();
  return { worker, engine: new Engine(new WorkerLink(worker as unknown as Worker), CARD) };
}

const HELLO = [{ role: "user", content: "hello" }];

/** A request with fields that the compiler would not allow, as from JavaScript or a spread object. */
function chat(fields: Record<string, unknown>): Promise<unknown> {
  return engine().engine.chat.completions.create({
    messages: HELLO,
    ...fields,
  } as unknown as ChatCompletionRequest);
}

describe("a chat request", () => {
  test.each([
    ["tools", [{ type: "function", function: { name: "not a name" } }]],
    ["tools", [{ type: "function", function: { name: "f", parameters: () => undefined } }]],
    ["tools", { type: "function", function: { name: "f" } }],
    ["tool_choice", "required"],
    ["response_format", { type: "regex" }],
    ["response_format", { type: "grammar", grammar: "" }],
    ["response_format", { type: "lark", grammar: "root" }],
    ["response_format", { type: "json_schema", json_schema: { schema: {} } }],
    ["response_format", { type: "json_schema", json_schema: { name: "x", schema: [] } }],
    ["response_format", { type: "json_schema", json_schema: { name: "x", schema: {}, strict: 1 } }],
    [
      "response_format",
      { type: "json_schema", json_schema: { name: "x", schema: { title: "x".repeat(70_000) } } },
    ],
    ["response_format", { type: "json_object", schema: {} }],
    ["response_format", "json_object"],
    ["functions", [{ name: "f" }]],
    ["reasoning_effort", "high"],
    ["modalities", ["text", "audio"]],
    ["temprature", 0],
    ["temprature", null],
    ["toString", 1],
    ["__proto__x", 1],
    ["onToken", () => undefined],
    ["model", "gpt-4o"],
    ["temperature", "0.5"],
    ["max_tokens", "5"],
    ["n", "2"],
    ["stream", "yes"],
    ["stream_options", { include_usage: "yes" }],
    ["stream_options", { usage: true }],
    ["logit_bias", [1, 2]],
    ["logit_bias", 5],
    ["logit_bias", { 5: () => 1 }],
    ["stop", [1]],
    ["stop", { text: "x" }],
    ["seed", "7"],
    ["ignore_eos", "no"],
    ["logprobs", 1],
    ["top_logprobs", 3],
    ["signal", 5],
    ["continue_final_message", "no"],
  ])("with %s %j is refused by name", async (name, value) => {
    const asked = chat({ [name]: value });
    await expect(asked).rejects.toBeInstanceOf(RequestError);
    await expect(asked).rejects.toMatchObject({ param: name, message: expect.stringContaining(name) });
  });

  test("takes what asks for nothing, as OpenAI does", async () => {
    const given = {
      model: "sample",
      user: "me",
      tools: [],
      tool_choice: "none",
      parallel_tool_calls: true,
      response_format: { type: "text" },
      functions: null,
      reasoning_effort: null,
      store: false,
      temperature: null,
      unknown: undefined,
      top_logprobs: 0,
      stream_options: null,
      logit_bias: null,
    };
    expect(await chat(given)).toMatchObject({ choices: [{ message: { content: "hi" } }] });
  });

  test("joins the parts of a message's text", async () => {
    const { engine: made, worker } = engine();
    const content = [
      { type: "text", text: "Once " },
      { type: "text", text: "upon" },
    ] as const;
    await made.chat.completions.create({ messages: [{ role: "user", content }] });
    await made.countTokens([{ role: "user", content }]);
    const messages = [{ role: "user", content: "Once upon" }];
    expect(worker.asked[0]?.prompt).toEqual({ kind: "chat", messages, continueLast: false });
    expect(worker.counted).toMatchObject([{ prompt: { messages } }]);
  });

  test("takes back the message that it gave", async () => {
    const answer = {
      role: "assistant",
      content: "hi",
      refusal: null,
      annotations: [],
      tool_calls: undefined,
    };
    await chat({ messages: [...HELLO, answer, ...HELLO] });
  });

  test.each([
    [[], /at least one/],
    ["hello", /at least one/],
    [["hello"], /messages\[0\] must be an object/],
    [[{ content: "x" }], /messages\[0\].role/],
    [[{ role: "user" }], /messages\[0\].content must be text/],
    [[{ role: "user", content: null }], /content must be text, not null/],
    [[{ role: "user", content: 5 }], /content must be text, not 5/],
    [
      [{ role: "user", content: [{ type: "image_url", image_url: { url: "x" } }] }],
      /content\[0\].*image_url/,
    ],
    [[{ role: "user", content: [{ type: "text" }] }], /content\[0\]/],
    [[{ role: "user", content: ["x"] }], /content\[0\]/],
    [
      [{ role: "assistant", content: "x", tool_calls: [{ id: "1" }] }],
      /messages\[0\].tool_calls\[0\] must be/,
    ],
    [[{ role: "user", content: "x", name: 5 }], /messages\[0\].name/],
  ])("with the messages %j is refused", async (messages, message) => {
    const asked = chat({ messages });
    await expect(asked).rejects.toMatchObject({
      name: "RequestError",
      param: "messages",
      message: expect.stringMatching(message),
    });
    const counted = engine().engine.countTokens(messages as unknown as MessageParam[]);
    await expect(counted).rejects.toMatchObject({ name: "RequestError", param: "messages" });
  });

  test.each([null, undefined, "hello", [HELLO]])("that is %j is refused", async (request) => {
    const asked = engine().engine.chat.completions.create(request as unknown as ChatCompletionRequest);
    await expect(asked).rejects.toBeInstanceOf(RequestError);
  });
});

describe("a plain request", () => {
  const plain = (fields: Record<string, unknown>): Promise<unknown> =>
    engine().engine.completions.create(fields as unknown as CompletionRequest);

  test.each([
    ["prompt", { prompt: ["a", "b"] }],
    ["prompt", {}],
    ["suffix", { prompt: "a", suffix: "b" }],
    ["best_of", { prompt: "a", best_of: 2 }],
    ["messages", { prompt: "a", messages: HELLO }],
    ["logprobs", { prompt: "a", logprobs: true }],
  ])("with another %s is refused by name", async (name, fields) => {
    await expect(plain(fields)).rejects.toMatchObject({ name: "RequestError", param: name });
  });

  test("with a format sends the worker its grammar, and with a wrong one is refused", async () => {
    const { worker, engine: asked } = engine();
    await asked.completions.create({ prompt: "a", response_format: { type: "regex", regex: "[0-9]" } });
    expect(worker.asked[0]).toMatchObject({
      prompt: { kind: "text", text: "a" },
      grammar: { kind: "regex", text: "[0-9]" },
    });
    expect(worker.asked[0]?.options).not.toHaveProperty("response_format");
    await expect(plain({ prompt: "a", response_format: { type: "regex" } })).rejects.toMatchObject({
      param: "response_format",
    });
  });

  test("takes token ids as they are, and nothing that is none", async () => {
    const { worker, engine: asked } = engine();
    const prompt = Object.freeze([5, 6, 7]);
    await asked.completions.create({ prompt });
    expect(worker.asked[0]).toMatchObject({ prompt: { kind: "text", text: [5, 6, 7] } });
    for (const wrong of [[], [1.5], [[5]], ["a"]])
      await expect(plain({ prompt: wrong })).rejects.toMatchObject({ param: "prompt" });
  });

  test("takes what asks for nothing", async () => {
    expect(await plain({ prompt: "", echo: false, suffix: null, best_of: 1 })).toMatchObject({
      choices: [{ text: "hi" }],
    });
  });
});
