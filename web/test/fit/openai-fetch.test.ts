import { ChatOpenAI } from "@langchain/openai";
import OpenAI from "openai";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { engineFetch } from "../../src/openai-fetch/index.js";
import { HybridClient } from "../../src/routing/index.js";
import {
  badQuestion,
  openToyChat,
  promptOf,
  question,
  type ToyChat,
  textAfter,
} from "../support/toy-chat.js";

/** The official client against an engine in this process, through the adapter. */
let toy: ToyChat;
let client: OpenAI;

beforeAll(async () => {
  toy = await openToyChat();
  client = new OpenAI({
    baseURL: "http://nearfar.local/v1",
    apiKey: "-",
    fetch: engineFetch(toy.engine),
    dangerouslyAllowBrowser: true,
  });
});
afterAll(() => toy.close());

const asked = (content: string, max_tokens = 20) => ({
  model: "toy",
  messages: [{ role: "user" as const, content }],
  max_tokens,
  temperature: 0,
});
const said = (content: string, count = 20): string => textAfter(promptOf([{ role: "user", content }]), count);

/** The error with which a promise is rejected. */
const failure = (promise: Promise<unknown>): Promise<unknown> =>
  promise.then(
    (value) => expect.fail(`not rejected, but ${JSON.stringify(value)}`),
    (error: unknown) => error,
  );

describe("the openai package on the device", () => {
  test("a whole chat and its usage", async () => {
    const content = question(20);
    const { choices, usage, object } = await client.chat.completions.create(asked(content));
    expect(object).toBe("chat.completion");
    expect(choices[0]).toMatchObject({
      message: { role: "assistant", content: said(content) },
      finish_reason: "length",
    });
    expect(usage?.completion_tokens).toBe(20);
  });

  test("a streamed chat", async () => {
    const content = question(20);
    const stream = await client.chat.completions.create({
      ...asked(content),
      stream: true,
      stream_options: { include_usage: true },
    });
    const pieces: string[] = [];
    let usage: OpenAI.CompletionUsage | null | undefined;
    for await (const chunk of stream) {
      pieces.push(chunk.choices[0]?.delta.content ?? "");
      usage = chunk.usage ?? usage;
    }
    expect(pieces.join("")).toBe(said(content));
    expect(pieces.length).toBeGreaterThan(10);
    expect(usage?.completion_tokens).toBe(20);
    const final = await client.chat.completions.stream(asked(content)).finalContent();
    expect(final).toBe(said(content));
  });

  test("plain completions, whole and streamed", async () => {
    const prompt = promptOf([{ role: "user", content: question(20) }]);
    const request = { model: "toy", prompt, max_tokens: 20, temperature: 0 } as const;
    const whole = await client.completions.create(request);
    expect(whole.choices[0]?.text).toBe(textAfter(prompt, 20));
    let text = "";
    for await (const { choices } of await client.completions.create({ ...request, stream: true }))
      text += choices[0]?.text ?? "";
    expect(text).toBe(textAfter(prompt, 20));
  });

  test("plain completions that begin with their prompt", async () => {
    const prompt = promptOf([{ role: "user", content: question(9) }]);
    const request = { model: "toy", prompt, max_tokens: 9, temperature: 0, echo: true } as const;
    const both = await client.completions.create({ ...request, n: 2, best_of: 2 });
    expect(both.choices.map((choice) => choice.text)).toEqual(Array(2).fill(prompt + textAfter(prompt, 9)));
    let text = "";
    for await (const { choices } of await client.completions.create({ ...request, stream: true }))
      text += choices[0]?.text ?? "";
    expect(text).toBe(prompt + textAfter(prompt, 9));
    const only = await client.completions.create({ ...request, max_tokens: 0 });
    expect(only.choices[0]).toMatchObject({ text: prompt, finish_reason: "length" });
    expect(only.usage?.completion_tokens).toBe(0);
    const tokens = await client.completions.create({ ...request, prompt: [5, 6], max_tokens: 0 });
    const one = await client.completions.create({ ...request, prompt: [5, 6], max_tokens: 1 });
    expect(tokens.choices[0]?.text).not.toBe("");
    expect(one.choices[0]?.text.startsWith(tokens.choices[0]?.text ?? "?")).toBe(true);
    expect(tokens.usage?.prompt_tokens).toBe(2);
  });

  test("the list of models", async () => {
    const found: string[] = [];
    for await (const { id } of client.models.list()) found.push(id);
    expect(found).toEqual(["toy"]);
    expect((await client.models.retrieve("toy")).id).toBe("toy");
    const missing = await failure(client.models.retrieve("another"));
    expect(missing).toBeInstanceOf(OpenAI.NotFoundError);
    expect(missing).toMatchObject({ status: 404, code: "model_not_found" });
  });

  test("requests that are refused have OpenAI's errors", async () => {
    const content = question(20);
    const cold = await failure(client.chat.completions.create({ ...asked(content), temperature: -1 }));
    expect(cold).toBeInstanceOf(OpenAI.BadRequestError);
    expect(cold).toMatchObject({ status: 400, param: "temperature", type: "invalid_request_error" });
    const other = await failure(client.chat.completions.create({ ...asked(content), model: "gpt-9" }));
    expect(other).toBeInstanceOf(OpenAI.NotFoundError);
    expect(other).toMatchObject({ code: "model_not_found", param: "model" });
    const misspelt = { ...asked(content), temprature: 1, stream: true } as const;
    expect(await failure(client.chat.completions.create(misspelt))).toMatchObject({
      status: 400,
      param: "temprature",
    });
    const embedded = await failure(client.embeddings.create({ model: "toy", input: "a" }));
    expect(embedded).toMatchObject({
      status: 404,
      message: expect.stringContaining("text and no embeddings"),
    });
  });

  test("a conversation that is too long has the code that clients know", async () => {
    const problem = { name: "RequestError", code: "context-overflow", param: "messages" };
    const create = (): Promise<never> => Promise.reject(Object.assign(new Error("too long"), problem));
    const fetch = engineFetch({ chat: { completions: { create } } });
    const response = await fetch("http://a/v1/chat/completions", { method: "POST", body: "{}" });
    expect(response.status).toBe(400);
    expect(await response.json()).toMatchObject({ error: { code: "context_length_exceeded" } });
  });

  test("a hybrid client answers too", async () => {
    const hybrid = new HybridClient({ device: toy.engine });
    const over = new OpenAI({ baseURL: "http://a/v1", apiKey: "-", fetch: engineFetch(hybrid) });
    const content = question(20);
    const { choices } = await over.chat.completions.create(asked(content));
    expect(choices[0]?.message.content).toBe(said(content));
    const stream = over.chat.completions.stream(asked(content));
    expect(await stream.finalContent()).toBe(said(content));
    const plain = over.completions.create({ model: "a", prompt: "a" });
    expect(await failure(plain)).toMatchObject({ status: 404 });
  });

  test("responses, whole, streamed, continued and of a hybrid client", async () => {
    const input = question(20);
    const request = { model: "toy", input, max_output_tokens: 20, temperature: 0 };
    const whole = await client.responses.create(request);
    expect(whole).toMatchObject({
      output_text: said(input),
      status: "incomplete",
      usage: { output_tokens: 20 },
    });
    expect((await toy.engine.responses.create(request)).output_text).toBe(said(input));
    const kinds: string[] = [];
    const stream = client.responses.stream(request);
    for await (const { type } of stream) kinds.push(type);
    expect([kinds[0], kinds.at(-1)]).toEqual(["response.created", "response.incomplete"]);
    expect((await stream.finalResponse()).output_text).toBe(said(input));
    const hybrid = new HybridClient({ device: toy.engine });
    const over = new OpenAI({ baseURL: "http://a/v1", apiKey: "-", fetch: engineFetch(hybrid) });
    expect((await over.responses.create(request)).output_text).toBe(said(input));
    const before = [
      { role: "user" as const, content: input },
      { role: "assistant" as const, content: said(input) },
    ];
    const again = question(9, before);
    const next = { ...request, input: again, previous_response_id: whole.id, max_output_tokens: 9 };
    const answer = textAfter(promptOf([...before, { role: "user", content: again }]), 9);
    expect((await client.responses.create(next)).output_text).toBe(answer);
    const refused = await failure(client.responses.create({ ...request, background: true }));
    expect(refused).toBeInstanceOf(OpenAI.BadRequestError);
    expect(refused).toMatchObject({ param: "background" });
  });

  test("a response that fails on the way ends its stream with the error", async () => {
    const input = badQuestion(60);
    const stream = await client.responses.create({
      model: "toy",
      input,
      max_output_tokens: 60,
      temperature: 0,
      stream: true,
    });
    const failed = failure(
      (async () => {
        for await (const _ of stream);
      })(),
    );
    expect(await failed).toMatchObject({ type: "server_error" });
  });

  test("bodies that are not requests", async () => {
    const fetch = engineFetch(toy.engine);
    const url = "http://nearfar.local/v1/chat/completions";
    for (const body of ["{", "[]", "null", '{"signal": {"aborted": true}}']) {
      const response = await fetch(url, { method: "POST", body });
      expect(response.status).toBe(400);
      expect(await response.json()).toMatchObject({ error: { type: "invalid_request_error" } });
    }
  });

  test("a device that fails on the way: an error in the stream, else a status", async () => {
    const request = asked(badQuestion(60), 60);
    const whole = await failure(client.chat.completions.create(request));
    expect(whole).toBeInstanceOf(OpenAI.InternalServerError);
    expect(whole).toMatchObject({ status: 503, type: "server_error" });
    let text = "";
    const streamed = await failure(
      (async () => {
        for await (const { choices } of await client.chat.completions.create({ ...request, stream: true }))
          text += choices[0]?.delta.content ?? "";
      })(),
    );
    expect(streamed).toBeInstanceOf(OpenAI.APIError);
    expect(streamed).toMatchObject({ type: "server_error" });
    expect(text.length).toBeGreaterThan(5);
  });

  test("aborts end the answer, and leaving the loop does", async () => {
    const request = { ...asked(question(200), 200), stream: true } as const;
    const stream = await client.chat.completions.create(request);
    let pieces = 0;
    for await (const _ of stream) if (++pieces === 3) stream.controller.abort();
    expect(pieces).toBe(3);
    for await (const _ of await client.chat.completions.create(request)) break;
    const controller = new AbortController();
    const whole = client.chat.completions.create(asked(question(200), 200), { signal: controller.signal });
    setTimeout(() => controller.abort());
    expect(await failure(whole)).toBeInstanceOf(OpenAI.APIUserAbortError);
    // None of these requests continues: all slots are free at once.
    const content = question(20);
    const answers = await Promise.all(
      Array.from({ length: 4 }, () => client.chat.completions.create(asked(content))),
    );
    expect(answers.map(({ choices }) => choices[0]?.message.content)).toEqual(Array(4).fill(said(content)));
  });

  test("a signal's reason is what fetch rejects with", async () => {
    const fetch = engineFetch(toy.engine);
    const body = JSON.stringify(asked(question(20)));
    const reason = new Error("enough");
    const url = "http://nearfar.local/v1/chat/completions";
    const sent = fetch(url, { method: "POST", body, signal: AbortSignal.abort(reason) });
    expect(await failure(sent)).toBe(reason);
  });
});

test("LangChain over the openai package", async () => {
  const model = new ChatOpenAI({
    model: "toy",
    apiKey: "-",
    maxTokens: 20,
    temperature: 0,
    configuration: { baseURL: "http://nearfar.local/v1", fetch: engineFetch(toy.engine) },
  });
  const content = question(20);
  expect((await model.invoke(content)).text).toBe(said(content));
  let text = "";
  for await (const piece of await model.stream(content)) text += piece.text;
  expect(text).toBe(said(content));
});
