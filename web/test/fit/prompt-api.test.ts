import { afterAll, afterEach, beforeAll, describe, expect, test, vi } from "vitest";
import { createEngine } from "../../src/here/index.js";
import {
  createLanguageModel,
  install,
  type LanguageModelFactory,
  type PromptMessage,
} from "../../src/prompt-api/index.js";
import type { MessageParam } from "../../src/protocol/openai.js";
import type { StaticServer } from "../support/serve.js";
import { promptOf, question, serveToyChat, textAfter } from "../support/toy-chat.js";

/** The Prompt API over an engine in this process, whose answers run to the end of its context. */
let server: StaticServer;
let LanguageModel: LanguageModelFactory;
let loads = 0;
/** Loads wait for this promise. */
let gate = Promise.resolve();
beforeAll(async () => {
  server = await serveToyChat();
  LanguageModel = createLanguageModel(async (options) => {
    loads++;
    await gate;
    return createEngine(server.url, options);
  });
});
afterEach(() => LanguageModel.unload());
afterAll(() => server.close());

const CONTEXT = 256;
const user = (content: string): PromptMessage => ({ role: "user", content });
const asked = (content: string) => [{ role: "user", content }] as const;
const greedy = { temperature: 0 };

/** A question that fills the context together with its answer, and the answer. */
function filling(before: readonly MessageParam[] = []) {
  const room = CONTEXT - promptOf([...before, ...asked("question 1")]).length;
  const content = question(room, before);
  const prompt = promptOf([...before, ...asked(content)]);
  return { content, answer: textAfter(prompt, CONTEXT - prompt.length) };
}

const failure = (promise: Promise<unknown>): Promise<unknown> =>
  promise.then(
    (value) => expect.fail(`not rejected, but ${JSON.stringify(value)}`),
    (error: unknown) => error,
  );

describe("the Prompt API on the device", () => {
  test("says what is available, loads once, and tells how far it is", async () => {
    loads = 0;
    expect(await LanguageModel.availability()).toBe("downloadable");
    expect(await LanguageModel.availability({ expectedInputs: [{ type: "image" }] })).toBe("unavailable");
    const told: number[] = [];
    const monitor = (target: EventTarget): void =>
      target.addEventListener("downloadprogress", (event) => told.push((event as ProgressEvent).loaded));
    let go = (): void => undefined;
    gate = new Promise((resolve) => {
      go = resolve;
    });
    const both = [LanguageModel.create({ monitor }), LanguageModel.create()];
    await vi.waitFor(async () => expect(await LanguageModel.availability()).toBe("downloading"), 20_000);
    go();
    await Promise.all(both);
    expect(await LanguageModel.availability()).toBe("available");
    expect(told[0]).toBe(0);
    expect(told.at(-1)).toBe(1);
    expect(told).toEqual([...told].sort((a, b) => a - b));
    expect(loads).toBe(1);
  });

  test("prompts, streams, and remembers", async () => {
    const initialPrompts: PromptMessage[] = [{ role: "system", content: "Be short." }];
    const session = await LanguageModel.create({ ...greedy, initialPrompts });
    const before = [{ role: "system", content: "Be short." }] as const;
    expect(session.contextUsage).toBe(promptOf(before).length);
    expect([session.contextWindow, session.inputQuota]).toEqual([CONTEXT, CONTEXT]);
    const { content, answer } = filling(before);
    expect(await session.measureInputUsage(content)).toBe(`user: ${content} `.length);
    expect(await session.prompt(content)).toBe(answer);
    expect(session.contextUsage).toBeGreaterThan(200);
    const other = await LanguageModel.create({ ...greedy, initialPrompts });
    const pieces: string[] = [];
    const reader = other.promptStreaming(content).getReader();
    for (let read = await reader.read(); !read.done; read = await reader.read()) pieces.push(read.value);
    expect(pieces.join("")).toBe(answer);
    expect(pieces.length).toBeGreaterThan(50);
  });

  test("append, clone and prefixes", async () => {
    const session = await LanguageModel.create(greedy);
    await session.append([user("My name is Ann"), { role: "assistant", content: "Hello Ann" }]);
    const before = [...asked("My name is Ann"), { role: "assistant", content: "Hello Ann" }] as const;
    expect(session.contextUsage).toBe(promptOf(before).length);
    const copy = await session.clone();
    const { content, answer } = filling(before);
    expect(await copy.prompt(content)).toBe(answer);
    expect(session.contextUsage).toBe(promptOf(before).length);
    expect(await session.prompt(content)).toBe(answer);
  });

  test("the oldest turns go where there is no room, the initial prompts stay", async () => {
    const initialPrompts: PromptMessage[] = [{ role: "system", content: "Be short." }];
    const session = await LanguageModel.create({ ...greedy, initialPrompts });
    let overflows = 0;
    session.addEventListener("contextoverflow", () => overflows++);
    session.onquotaoverflow = () => overflows++;
    await session.append([user("x".repeat(100)), { role: "assistant", content: "y" }]);
    const kept = [...asked("z".repeat(80)), { role: "assistant", content: "y" }] as const;
    await session.append([...kept]);
    expect(overflows).toBe(0);
    const before = [{ role: "system", content: "Be short." }, ...kept] as const;
    const { content, answer } = filling(before);
    expect(await session.prompt(content)).toBe(answer);
    expect(overflows).toBe(2);
    await session.append("w".repeat(150));
    expect(overflows).toBe(4);
    const long = await failure(session.prompt("w".repeat(300)));
    expect(long).toMatchObject({ name: "QuotaExceededError", quota: CONTEXT });
    const begun = LanguageModel.create({ initialPrompts: [user("w".repeat(300))] });
    expect(await failure(begun)).toMatchObject({ name: "QuotaExceededError" });
  });

  test("what is not supported, or wrong, is refused by name", async () => {
    const create = (options: Parameters<typeof LanguageModel.create>[0]) =>
      failure(LanguageModel.create(options));
    const known = { name: "f", description: "", inputSchema: {}, execute: () => "" };
    expect(await create({ tools: [known] })).toMatchObject({ name: "NotSupportedError" });
    expect(await create({ tools: [{ ...known, execute: "f" as never }] })).toMatchObject({
      name: "TypeError",
    });
    expect(await create({ expectedInputs: [{ type: "audio" }] })).toMatchObject({
      name: "NotSupportedError",
    });
    expect(await create({ temperature: -1 })).toBeInstanceOf(RangeError);
    expect(await create({ topK: 0 })).toBeInstanceOf(RangeError);
    expect(await create({ initialPrompts: [user("a"), { role: "system", content: "b" }] })).toBeInstanceOf(
      TypeError,
    );
    const session = await LanguageModel.create();
    const image = { role: "user", content: [{ type: "image", value: 1 }] } as const;
    expect(await failure(session.prompt([image]))).toMatchObject({ name: "NotSupportedError" });
    expect(await failure(session.prompt([{ ...user("a"), prefix: true }]))).toBeInstanceOf(SyntaxError);
    const flags = session.prompt("a", { responseConstraint: /a/i });
    expect(await failure(flags)).toMatchObject({ name: "NotSupportedError" });
  });

  test("a constraint is OpenAI's response_format, the prefix vLLM's continue_final_message", async () => {
    const requests: unknown[] = [];
    const model = createLanguageModel(async (options) => {
      const engine = await createEngine(server.url, options);
      const create = (request: { messages: never }) => {
        requests.push(request);
        return engine.chat.completions.create({ messages: request.messages, max_tokens: 1, stream: true });
      };
      const chat = { completions: { create } } as unknown as typeof engine.chat;
      return {
        chat,
        model: engine.model,
        countTokens: (messages) => engine.countTokens(messages),
        dispose: () => engine.dispose(),
      };
    });
    const session = await model.create();
    await session.prompt("a", { responseConstraint: { type: "object" } });
    await session.prompt("a", { responseConstraint: /a+/ });
    await session.prompt([user("a"), { role: "assistant", content: "b", prefix: true }]);
    expect(requests).toMatchObject([
      { response_format: { type: "json_schema", json_schema: { schema: { type: "object" } } } },
      { response_format: { type: "regex", regex: "a+" } },
      { continue_final_message: true },
    ]);
    await model.unload();
  });

  test("aborts reject with their reason, and leave the conversation as it was", async () => {
    const session = await LanguageModel.create(greedy);
    const { content, answer } = filling();
    const reason = new Error("enough");
    expect(await failure(session.prompt(content, { signal: AbortSignal.abort(reason) }))).toBe(reason);
    const controller = new AbortController();
    const reader = session.promptStreaming(content, { signal: controller.signal }).getReader();
    await reader.read();
    controller.abort(reason);
    const rest = (async () => {
      for (;;) if ((await reader.read()).done) return;
    })();
    expect(await failure(rest)).toBe(reason);
    expect(session.contextUsage).toBe(0);
    const left = session.promptStreaming(content).getReader();
    await left.read();
    await left.cancel();
    const queued = await Promise.all([session.prompt(content), failure(session.prompt("w".repeat(300)))]);
    expect(queued).toMatchObject([answer, { name: "QuotaExceededError" }]);
  });

  test("destroyed sessions end, and a create that is left ends the load", async () => {
    const session = await LanguageModel.create(greedy);
    const { content } = filling();
    const running = session.prompt(content);
    session.destroy();
    expect(await failure(running)).toMatchObject({ name: "AbortError" });
    expect(await failure(session.prompt(content))).toMatchObject({ name: "AbortError" });
    await LanguageModel.unload();
    server.intercept = (path) => path.endsWith(".wasm");
    const controller = new AbortController();
    const reason = new Error("enough");
    const created = LanguageModel.create({ signal: controller.signal });
    await vi.waitFor(async () => expect(await LanguageModel.availability()).toBe("downloading"), 20_000);
    controller.abort(reason);
    expect(await failure(created)).toBe(reason);
    server.intercept = () => false;
    expect(await LanguageModel.availability()).toBe("downloadable");
    await LanguageModel.create();
    expect(await LanguageModel.availability()).toBe("available");
  });

  test("is put where there is none, once", () => {
    expect("LanguageModel" in globalThis).toBe(false);
    expect(install("http://nowhere.invalid/")).toBe(true);
    expect("LanguageModel" in globalThis).toBe(true);
    expect(install("http://nowhere.invalid/")).toBe(false);
    Reflect.deleteProperty(globalThis, "LanguageModel");
  });

  test.each([
    { says: "unavailable", by: "ours" },
    { says: "throws", by: "ours" },
    { says: "available", by: "own" },
    { says: "downloadable", by: "own" },
    { says: "available", replace: true, by: "ours" },
  ])("stands in for one of the browser that $says: $by answers ($replace)", async ({ says, replace, by }) => {
    const own = {
      availability: async () => (says === "throws" ? Promise.reject(new Error("switched off")) : says),
      create: async () => ({ prompt: async () => "own" }),
    };
    vi.stubGlobal("LanguageModel", own);
    try {
      expect(install((options) => createEngine(server.url, options), { replace: replace ?? false })).toBe(
        true,
      );
      const model = Reflect.get(globalThis, "LanguageModel") as LanguageModelFactory;
      expect(await model.availability()).toBe(by === "own" ? says : "downloadable");
      const session = await model.create(greedy);
      const { content, answer } = filling();
      expect(await session.prompt(content)).toBe(by === "own" ? "own" : answer);
      if (by === "ours") session.destroy();
      await model.unload();
    } finally {
      vi.unstubAllGlobals();
      Reflect.deleteProperty(globalThis, "LanguageModel");
    }
  });
});
