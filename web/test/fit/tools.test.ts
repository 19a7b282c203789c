import type { JSONSchema7 } from "@ai-sdk/provider";
import type { AIMessageChunk } from "@langchain/core/messages";
import { ChatOpenAI } from "@langchain/openai";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { nearfar } from "../../src/ai-sdk/index.js";
import { engineFetch } from "../../src/openai-fetch/index.js";
import type { Engine } from "../../src/page/client.js";
import { createLanguageModel } from "../../src/prompt-api/index.js";
import type { ToolCallDelta } from "../../src/protocol/openai.js";
import { HybridClient } from "../../src/routing/index.js";
import { callOf, openParrot, type Parrot, says } from "../support/parrot.js";

/** Tools through other people's packages, over an engine in this process with scripted answers. */
let parrot: Parrot;
beforeAll(async () => {
  parrot = await openParrot();
});
afterAll(() => parrot.close());

const PARAMETERS: JSONSchema7 & { type: "object" } = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
const WEATHER = {
  type: "function",
  function: { name: "weather", description: "The weather of a city.", parameters: PARAMETERS },
} as const;
const ASKED = `Weather? ${says(`<think>Where?</think>\n${callOf("weather", { city: "Oslo" })}`)}`;
const SAID = `Rain. ${says("It rains in Oslo.")}`;

describe("the AI SDK", () => {
  const asked: unknown[] = [];
  const weather = tool({
    description: "The weather of a city.",
    inputSchema: jsonSchema<{ city: string }>(PARAMETERS),
    execute: async (input) => {
      asked.push(input);
      return { said: SAID };
    },
  });
  const base = { tools: { weather }, temperature: 0, stopWhen: stepCountIs(3), maxOutputTokens: 200 };

  test("generateText calls tools, and goes on with their results", async () => {
    const { text, steps, finishReason } = await generateText({
      ...base,
      model: nearfar(parrot.engine),
      prompt: ASKED,
    });
    expect(asked).toEqual([{ city: "Oslo" }]);
    expect(text).toBe("It rains in Oslo.");
    expect(finishReason).toBe("stop");
    expect(steps).toMatchObject([
      { finishReason: "tool-calls", reasoningText: "Where?", toolCalls: [{ toolName: "weather" }] },
      { finishReason: "stop", toolCalls: [] },
    ]);
  });

  test("streamText streams reasoning, calls and the answer", async () => {
    const result = streamText({ ...base, model: nearfar(parrot.engine), prompt: ASKED });
    const parts: string[] = [];
    const written: string[] = [];
    for await (const part of result.stream) {
      if (parts.at(-1) !== part.type) parts.push(part.type);
      if (part.type === "tool-input-delta") written.push(part.delta);
    }
    expect(written.join("")).toBe('{"city": "Oslo"}');
    expect(written.length).toBeGreaterThan(5);
    const order = [
      "reasoning-start",
      "tool-input-start",
      "tool-input-delta",
      "tool-input-end",
      "tool-call",
      "tool-result",
      "text-start",
    ];
    expect(parts.filter((type) => order.includes(type))).toEqual(order);
    expect(await result.text).toBe("It rains in Oslo.");
    expect(await result.finishReason).toBe("stop");
  });

  test("a tool that must be called", async () => {
    const { toolCalls } = await generateText({
      ...base,
      model: nearfar(parrot.engine),
      prompt: says("<tool_call>No."),
      toolChoice: { type: "tool", toolName: "weather" },
      stopWhen: stepCountIs(1),
    });
    expect(toolCalls).toMatchObject([{ toolName: "weather", input: { city: expect.any(String) } }]);
  });
});

describe("over OpenAI's interface", () => {
  const options = { apiKey: "-", dangerouslyAllowBrowser: true };

  test("the openai package runs tools", async () => {
    const client = new OpenAI({ ...options, baseURL: "http://a/v1", fetch: engineFetch(parrot.engine) });
    const cities: string[] = [];
    const runner = client.chat.completions.runTools({
      model: "toy",
      stream: true,
      temperature: 0,
      messages: [{ role: "user", content: ASKED }],
      tools: [
        {
          type: "function",
          function: {
            name: "weather",
            description: "The weather of a city.",
            parameters: { ...PARAMETERS },
            parse: JSON.parse,
            function: ({ city }: { city: string }) => {
              cities.push(city);
              return SAID;
            },
          },
        },
      ],
    });
    const written: string[] = [];
    runner.on("tool_calls.function.arguments.delta", (event) => written.push(event.arguments_delta));
    const done: unknown[] = [];
    runner.on("tool_calls.function.arguments.done", (event) => done.push(event.arguments));
    expect(await runner.finalContent()).toBe("It rains in Oslo.");
    expect(cities).toEqual(["Oslo"]);
    expect(written.join("")).toBe('{"city": "Oslo"}');
    expect(written.length).toBeGreaterThan(5);
    expect(done).toEqual(['{"city": "Oslo"}']);
  });

  test("LangChain's bindTools", async () => {
    const fetch = engineFetch(parrot.engine);
    const model = new ChatOpenAI({
      model: "toy",
      temperature: 0,
      apiKey: "-",
      configuration: { ...options, baseURL: "http://a/v1", fetch },
    });
    const { tool_calls } = await model.bindTools([WEATHER]).invoke(ASKED);
    expect(tool_calls).toMatchObject([{ name: "weather", args: { city: "Oslo" } }]);
    const written: string[] = [];
    let whole: AIMessageChunk | undefined;
    for await (const chunk of await model.bindTools([WEATHER]).stream(ASKED)) {
      written.push(...(chunk.tool_call_chunks ?? []).map((part) => part.args ?? ""));
      whole = whole?.concat(chunk) ?? chunk;
    }
    expect(written.join("")).toBe('{"city": "Oslo"}');
    expect(written.length).toBeGreaterThan(5);
    expect(whole?.tool_calls).toMatchObject([{ name: "weather", args: { city: "Oslo" } }]);
  });
});

describe("the Prompt API", () => {
  const weather = (execute: (input: { city: string }) => unknown) => ({
    name: "weather",
    description: "The weather of a city.",
    inputSchema: PARAMETERS,
    execute,
  });
  const model = createLanguageModel(async () => {
    const { chat, model } = parrot.engine;
    const countTokens: Engine["countTokens"] = (...asked) => parrot.engine.countTokens(...asked);
    return { chat, model, countTokens, dispose: async () => undefined };
  });

  test("runs tools, and keeps what they gave", async () => {
    const asked: unknown[] = [];
    const execute = async (input: object): Promise<string> => {
      asked.push(input);
      return SAID;
    };
    const session = await model.create({ tools: [weather(execute)] });
    const before = session.contextUsage;
    expect(before).toBe(0);
    expect(await session.prompt(ASKED)).toBe("It rains in Oslo.");
    expect(asked).toEqual([{ city: "Oslo" }]);
    expect(session.contextUsage).toBeGreaterThan(300);
    expect(await session.prompt(says("Bye."))).toBe("Bye.");
  });

  test("a tool that throws ends the prompt, and leaves the conversation as it was", async () => {
    const session = await model.create({
      tools: [
        weather(() => {
          throw new Error("no network");
        }),
      ],
    });
    await expect(session.prompt(ASKED)).rejects.toThrow("no network");
    expect(session.contextUsage).toBe(0);
  });

  test("a model that calls for ever is stopped", async () => {
    const session = await model.create({ tools: [weather(() => ASKED)] });
    await expect(session.prompt(ASKED)).rejects.toMatchObject({ name: "OperationError" });
  });
});

describe("a hybrid client", () => {
  test("keeps tools on a device that has them, with calls and results", async () => {
    const client = new HybridClient({ device: parrot.engine });
    const base = { tools: [WEATHER], temperature: 0 };
    const first = await client.chat.completions.create({
      ...base,
      messages: [{ role: "user", content: ASKED }],
    });
    expect(first.choices[0]).toMatchObject({
      message: { reasoning_content: "Where?", tool_calls: [{ function: { name: "weather" } }] },
      finish_reason: "tool_calls",
    });
    expect(first.x_nearfar.route).toBe("device");
    const chunks = await client.chat.completions.create({
      ...base,
      messages: [{ role: "user", content: ASKED }],
      stream: true,
    });
    const parts: ToolCallDelta[] = [];
    for await (const { choices } of chunks) parts.push(...(choices[0]?.delta.tool_calls ?? []));
    expect(parts[0]).toMatchObject({ index: 0, function: { name: "weather", arguments: "" } });
    const written = parts.slice(1).map((part) => part.function?.arguments);
    expect(written.length).toBeGreaterThan(5);
    expect(written.join("")).toBe(first.choices[0]?.message.tool_calls?.[0]?.function.arguments);
    const [call] = first.choices[0]?.message.tool_calls ?? [];
    const messages = [
      { role: "user", content: ASKED },
      { role: "assistant", content: null, tool_calls: call ? [call] : [] },
      { role: "tool", tool_call_id: call?.id ?? "", content: SAID },
    ];
    const second = await client.chat.completions.create({ ...base, messages });
    expect(second.choices[0]?.message.content).toBe("It rains in Oslo.");
  });

  test("has nowhere to go with tools where the device has none", async () => {
    const client = new HybridClient({ device: parrot.engine, device_features: ["logprobs"] });
    const messages = [{ role: "user", content: ASKED }];
    await expect(client.chat.completions.create({ messages, tools: [WEATHER] })).rejects.toMatchObject({
      name: "RouteError",
    });
  });
});
