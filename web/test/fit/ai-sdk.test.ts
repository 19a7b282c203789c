import { generateText, jsonSchema, stepCountIs, streamText, tool, UnsupportedFunctionalityError } from "ai";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { nearfar } from "../../src/ai-sdk/index.js";
import { HybridClient } from "../../src/routing/index.js";
import {
  badQuestion,
  openToyChat,
  promptOf,
  question,
  type ToyChat,
  textAfter,
} from "../support/toy-chat.js";

/** The real `ai` package over an engine in this process. */
let toy: ToyChat;
beforeAll(async () => {
  toy = await openToyChat();
});
afterAll(() => toy.close());

const said = (content: string, count = 20): string => textAfter(promptOf([{ role: "user", content }]), count);
const failure = (promise: PromiseLike<unknown>): Promise<unknown> =>
  Promise.resolve(promise).then(
    (value) => expect.fail(`not rejected, but ${JSON.stringify(value)}`),
    (error: unknown) => error,
  );
const base = { maxOutputTokens: 20, temperature: 0 };

describe("the AI SDK on the device", () => {
  test("generateText: text, usage, finish reason, response", async () => {
    const prompt = question(20);
    const { text, usage, finishReason, response, warnings } = await generateText({
      model: nearfar(toy.engine),
      prompt,
      ...base,
    });
    expect(text).toBe(said(prompt));
    expect(usage).toMatchObject({ inputTokens: promptOf([{ role: "user", content: prompt }]).length });
    expect(usage).toMatchObject({ outputTokens: 20 });
    expect(finishReason).toBe("length");
    expect(response).toMatchObject({ modelId: "toy", id: expect.stringMatching(/^chatcmpl-/) });
    expect(warnings ?? []).toEqual([]);
  });

  test("conversations with parts, and a stop sequence", async () => {
    const before = [
      { role: "system", content: "Be short." },
      { role: "user", content: "Hi there" },
      { role: "assistant", content: "Hello" },
    ] as const;
    const content = question(20, before);
    const expected = textAfter(promptOf([...before, { role: "user", content }]), 20);
    const stop = expected.slice(8, 11);
    const { text, finishReason } = await generateText({
      model: nearfar(toy.engine),
      instructions: "Be short.",
      messages: [
        {
          role: "user",
          content: [
            { type: "text", text: "Hi " },
            { type: "text", text: "there" },
          ],
        },
        before[2],
        { role: "user", content },
      ],
      stopSequences: [stop],
      ...base,
    });
    expect(text).toBe(expected.slice(0, expected.indexOf(stop)));
    expect(finishReason).toBe("stop");
  });

  test("streamText: pieces, then the usage", async () => {
    const prompt = question(20);
    const result = streamText({ model: nearfar(toy.engine), prompt, ...base });
    const pieces: string[] = [];
    for await (const piece of result.textStream) pieces.push(piece);
    expect(pieces.join("")).toBe(said(prompt));
    expect(pieces.length).toBeGreaterThan(10);
    expect(await result.finishReason).toBe("length");
    expect(await result.usage).toMatchObject({ outputTokens: 20 });
  });

  test("settings go through, and the engine's own by providerOptions", async () => {
    const prompt = question(20);
    const all = { topP: 0.9, topK: 5, presencePenalty: 0.1, frequencyPenalty: 0.1, seed: 7 };
    const model = nearfar(toy.engine);
    const { text } = await generateText({
      model,
      prompt,
      ...base,
      ...all,
      providerOptions: { nearfar: { min_p: 0.1 } },
    });
    expect(text.length).toBeGreaterThan(10);
    const misspelt = { ...base, providerOptions: { nearfar: { minp: 0.1 } } };
    expect(await failure(generateText({ model, prompt, ...misspelt }))).toMatchObject({ param: "minp" });
    const wrong = await failure(generateText({ model, prompt, ...base, topP: 7 }));
    expect(wrong).toMatchObject({ name: "RequestError", param: "top_p" });
  });

  test("what is unsupported is refused by name or warned of, never left out", async () => {
    const model = nearfar(toy.engine);
    const prompt = question(20);
    const weather = tool({ inputSchema: jsonSchema({ type: "object" }), execute: async () => "sun" });
    const tools = await failure(
      generateText({ model, prompt, tools: { weather }, stopWhen: stepCountIs(2), maxRetries: 0 }),
    );
    expect(tools).toMatchObject({ name: "RequestError", param: "tools", code: "unsupported" });
    const theirs = { type: "provider", id: "other.search", name: "search", args: {} } as const;
    const asked = [{ role: "user", content: [{ type: "text", text: "a" }] }] as const;
    const foreign = await failure(model.doGenerate({ prompt: [...asked] as never, tools: [theirs] }));
    expect(UnsupportedFunctionalityError.isInstance(foreign)).toBe(true);
    expect(String(foreign)).toContain("search");
    const image = { type: "file", data: new Uint8Array([1, 2]), mediaType: "image/png" } as const;
    const seen = await failure(
      generateText({ model, messages: [{ role: "user", content: [image] }], maxRetries: 0 }),
    );
    expect(UnsupportedFunctionalityError.isInstance(seen)).toBe(true);
    expect(String(seen)).toContain("image/png");
    const { warnings } = await generateText({ model, prompt, ...base, reasoning: "high" });
    expect(warnings).toMatchObject([{ type: "unsupported", feature: "reasoning" }]);
  });

  test("a hybrid client is a model too", async () => {
    const prompt = question(20);
    const model = nearfar(new HybridClient({ device: toy.engine }));
    expect(model.modelId).toBe("hybrid");
    expect((await generateText({ model, prompt, ...base })).text).toBe(said(prompt));
    const { textStream, usage } = streamText({ model, prompt, ...base });
    let text = "";
    for await (const piece of textStream) text += piece;
    expect(text).toBe(said(prompt));
    expect(await usage).toMatchObject({ outputTokens: 20 });
  });

  test("JSON is asked for as OpenAI's requests ask for it", async () => {
    const asked: unknown[] = [];
    const create = async (request: unknown): Promise<unknown> => {
      asked.push(request);
      return toy.engine.chat.completions.create({
        messages: [{ role: "user", content: question(20) }],
        max_tokens: 1,
      });
    };
    const model = nearfar({ chat: { completions: { create } }, model: toy.engine.model });
    const schema = { type: "object", properties: {} } as const;
    const prompt: Parameters<typeof model.doGenerate>[0]["prompt"] = [
      { role: "user", content: [{ type: "text", text: "a" }] },
    ];
    await model.doGenerate({ prompt, responseFormat: { type: "json", schema, name: "it" } });
    await model.doGenerate({ prompt, responseFormat: { type: "json" } });
    expect(asked).toMatchObject([
      { response_format: { type: "json_schema", json_schema: { name: "it", schema, strict: true } } },
      { response_format: { type: "json_object" } },
    ]);
  });

  test("a device that fails on the way ends the stream with its error", async () => {
    const model = nearfar(toy.engine);
    const errors: unknown[] = [];
    const result = streamText({
      model,
      prompt: badQuestion(60),
      temperature: 0,
      maxOutputTokens: 60,
      onError: ({ error }) => void errors.push(error),
    });
    let text = "";
    for await (const piece of result.textStream) text += piece;
    expect(text.length).toBeGreaterThan(5);
    expect(errors).toMatchObject([{ name: "DeviceError" }]);
    expect(await result.finishReason).toBe("error");
  });

  test("an abort ends the answer", async () => {
    const controller = new AbortController();
    let aborted = false;
    const result = streamText({
      model: nearfar(toy.engine),
      prompt: question(200),
      temperature: 0,
      maxOutputTokens: 200,
      abortSignal: controller.signal,
      onAbort: () => {
        aborted = true;
      },
    });
    let pieces = 0;
    for await (const _ of result.textStream) if (++pieces === 3) controller.abort();
    expect(aborted).toBe(true);
    expect(pieces).toBeLessThan(20);
    const whole = generateText({
      model: nearfar(toy.engine),
      prompt: question(200),
      maxOutputTokens: 200,
      temperature: 0,
      abortSignal: AbortSignal.abort(),
    });
    expect(await failure(whole)).toMatchObject({ name: "AbortError" });
  });
});
