import { expect, test } from "vitest";
import { Channel } from "../src/page/channel.js";
import { readPrompt as readOnPage } from "../src/page/decide.js";
import { promptOf } from "../src/page/requests.js";
import type { AnswerEvent, GenerateRequest, RequestStats } from "../src/protocol/messages.js";
import { EngineCore } from "../src/worker/engine/engine-core.js";
import type { Request } from "../src/worker/engine/request.js";
import { parseSampling } from "../src/worker/engine/sampling.js";
import { PromptScores, readPrompt } from "../src/worker/session/prompt-scores.js";
import { expectedTokens, FakeBackend } from "./support/fake-backend.js";

const PARAMS = { ...parseSampling({ temperature: 0 }, null, 97), maxTokens: 6 };
const PROMPT = Array.from({ length: 30 }, (_, at) => at + 1);

function softened(logits: readonly number[]): number[] {
  const sum = logits.reduce((sum, each) => sum + Math.exp(each), 0);
  return logits.map((each) => each - Math.log(sum));
}

/** Reads a prompt, and gives the events up to the end. */
function read(core: EngineCore, prompt: readonly number[], tokens: number[], perplexity = false) {
  return new Promise<AnswerEvent[]>((resolve) => {
    const told: AnswerEvent[] = [];
    const tell = (event: AnswerEvent): void => {
      told.push(event);
      if (event.event === "read" || event.event === "error") resolve(told);
    };
    readPrompt(core, prompt, { tokens, perplexity }, PARAMS, 97, tell, () => undefined);
  });
}

function fail(): never {
  throw new Error("it failed");
}

function statsOf(core: EngineCore, prompt: readonly number[]): Promise<RequestStats> {
  return new Promise((resolve, reject) => {
    const finish = (_: unknown, stats: RequestStats): void => resolve(stats);
    core.submit(prompt, PARAMS, { token: () => true, finish, fail: reject });
  });
}

function answer(core: EngineCore, prompt: readonly number[]): Promise<number[]> {
  return new Promise((resolve, reject) => {
    const tokens: number[] = [];
    const listener = { token: (token: number) => tokens.push(token) > 0, finish: () => resolve(tokens) };
    core.submit(prompt, PARAMS, { ...listener, fail: reject });
  });
}

test("a prompt that is read shows log-probabilities of its last row, beside answers", async () => {
  const backend = new FakeBackend();
  const core = new EngineCore(backend, []);
  const others = [[5, 6, 7], PROMPT.slice(4)];
  const [told, ...answers] = await Promise.all([
    read(core, PROMPT, [9, 0, 96], true),
    ...others.map((prompt) => answer(core, prompt)),
  ]);
  expect(answers).toEqual(others.map((prompt) => expectedTokens(prompt, 6)));
  const [shown] = told;
  if (shown?.event !== "read") throw new Error(JSON.stringify(shown));
  const row = softened(backend.logitsAfter(PROMPT));
  expect(shown.logprobs).toEqual([9, 0, 96].map((token) => expect.closeTo(row[token] ?? 0, 5)));
  const likeliest = [...row].sort((a, b) => b - a).slice(0, 20);
  expect(shown.top).toEqual(likeliest.map((each) => expect.closeTo(each, 5)));
  expect(shown.stats).toMatchObject({ promptTokens: 30, completionTokens: 0 });
  expect(shown.promptLogprob).toBeLessThan(0);
});

test("the mean of the prompt's last tokens is that of computed rows, each with its own next token", async () => {
  const backend = new FakeBackend();
  const core = new EngineCore(backend, []);
  const [shown] = await read(core, PROMPT.slice(0, 9), [], true);
  const own = PROMPT.slice(1, 9).map(
    (token, at) => softened(backend.logitsAfter(PROMPT.slice(0, at + 1)))[token] ?? 0,
  );
  const mean = own.reduce((sum, each) => sum + each, 0) / own.length;
  expect(shown).toMatchObject({ promptLogprob: expect.closeTo(mean, 5), logprobs: [] });
});

test("rows that are not wanted need no row of logits, and optional ones share what is left", () => {
  const long = Array.from({ length: 65 }, () => 1);
  const scores = new PromptScores(long, { tokens: [], perplexity: true });
  const [count, positions] = scores.rows(0, 65, 16);
  expect([count, positions.length, positions.at(-1)]).toEqual([65, 14, 64]);
  expect(scores.rows(60, 5, 0)).toEqual([4, []]);
  expect(scores.rows(0, 10, 0)).toEqual([10, []]);
  expect(new PromptScores(long, { tokens: [], perplexity: false }).rows(0, 65, 16)).toEqual([65, [64]]);
});

test("a prompt that was read is held for its answer, is not counted, and makes room for others", async () => {
  const backend = new FakeBackend({ pages: 24, slots: 4 });
  const core = new EngineCore(backend, []);
  const free = core.freeTokens;
  const held = await new Promise<Request>((resolve) => {
    const made = readPrompt(
      core,
      PROMPT,
      { tokens: [], perplexity: true },
      PARAMS,
      97,
      () => resolve(made),
      fail,
    );
  });
  expect(core.freeTokens).toBe(free);
  backend.runs.length = 0;
  const stats = await statsOf(core, PROMPT);
  expect([stats.promptTokens, stats.cachedTokens]).toEqual([30, 29]);
  expect(backend.runs.map(({ size }) => size)[0]).toBe(1);
  expect(
    await core.alone(
      () => null,
      async () => 5,
    ),
  ).toBe(5);
  expect(held.sequence, "the cache was lost").toBeNull();
  core.cancel(held);
  expect(core.freeTokens).toBe(free);
  await read(core, PROMPT, []);
  const others = [0, 1, 2, 3].map((at) => PROMPT.slice(0, 16).map((token) => token + at * 20));
  expect(await Promise.all(others.map((prompt) => answer(core, prompt)))).toEqual(
    others.map((prompt) => expectedTokens(prompt, 6)),
  );
  expect((await statsOf(core, PROMPT)).cachedTokens).toBeLessThan(29);
});

test("logits that are not finite fail the reading alone", async () => {
  const backend = new FakeBackend();
  backend.notFinite = (seen) => seen.length === 30;
  const core = new EngineCore(backend, []);
  const [[failed], text] = await Promise.all([read(core, PROMPT, [1]), answer(core, [5, 6, 7])]);
  expect(failed).toMatchObject({ event: "error", error: { message: expect.stringMatching(/not finite/) } });
  expect(text).toEqual(expectedTokens([5, 6, 7], 6));
  await expect(read(core, PROMPT, [97])).rejects.toThrow("token id 97 is outside the vocabulary of 97");
});

test("the page gives what the worker read, and the reason of a signal", async () => {
  const requests: GenerateRequest[] = [];
  const events = new Channel<AnswerEvent>();
  let aborted = 0;
  const generate = (request: GenerateRequest) => {
    requests.push(request);
    const abort = (): void => {
      aborted += 1;
    };
    return { events, abort };
  };
  const parts = { source: { generate }, model: "m", promptOf };
  const reading = readOnPage(parts, [{ role: "user", content: "?" }], { tokens: [3] });
  events.put({ event: "accepted" });
  const stats = { promptTokens: 5, cachedTokens: 0, completionTokens: 0, ttft: 1, decode: 0 };
  events.put({ event: "read", top: [-1], logprobs: [-2], promptLogprob: null, stats });
  expect(aborted).toBe(0);
  expect(await reading).toMatchObject({ prompt_tokens: 5, top: [-1], logprobs: [-2], prompt_logprob: null });
  expect(requests).toMatchObject([{ reading: { tokens: [3], perplexity: false } }]);
  const holding = new AbortController();
  const held = readOnPage(parts, "x", { hold: true, signal: holding.signal });
  events.put({ event: "read", top: [-1], logprobs: [], promptLogprob: null, stats });
  await held;
  expect(aborted).toBe(1);
  holding.abort();
  expect(aborted).toBe(2);
  const controller = new AbortController();
  const left = readOnPage(parts, "x", { signal: controller.signal });
  controller.abort(new Error("enough"));
  await expect(left).rejects.toThrow("enough");
  expect(aborted).toBe(3);
});
