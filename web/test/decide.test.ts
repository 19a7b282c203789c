import { readFileSync } from "node:fs";
import { describe, expect, test } from "vitest";
import { MAX_LABEL_CHARS, MAX_LABELS } from "../src/format/constants.js";
import { Channel } from "../src/page/channel.js";
import { decide } from "../src/page/decide.js";
import { labelOdds } from "../src/page/label-odds.js";
import { promptOf } from "../src/page/requests.js";
import type { AnswerEvent, GenerateRequest } from "../src/protocol/messages.js";
import type { Decision } from "../src/protocol/openai.js";
import { EngineCore } from "../src/worker/engine/engine-core.js";
import type { TokenLogprobs } from "../src/worker/engine/request.js";
import { parseSampling } from "../src/worker/engine/sampling.js";
import { Forced, labelTokens } from "../src/worker/session/labels.js";
import type { TextCodec } from "../src/worker/text/types.js";
import { FakeBackend } from "./support/fake-backend.js";

interface Case {
  readonly name: string;
  readonly labels: number[][];
  readonly logprobs: number[];
  readonly neutral: number[] | null;
  readonly probabilities: number[];
  readonly confidence: number;
  readonly choice: number;
}

const { cases } = JSON.parse(
  readFileSync(new URL("../../tests/vectors/decisions/odds.json", import.meta.url), "utf8"),
) as { readonly cases: readonly Case[] };

test.each(cases)("odds: $name", ({ labels, logprobs, neutral, probabilities, confidence, choice }) => {
  const made = labelOdds(labels, logprobs, neutral);
  for (const [at, share] of probabilities.entries()) expect(made.probabilities[at]).toBeCloseTo(share, 9);
  expect(made.confidence).toBeCloseTo(confidence, 9);
  expect(made.choice).toBe(choice);
});

/** A worker that gives each label's characters as tokens, with these log-probabilities by prompt. */
function source(said: (request: GenerateRequest) => readonly number[][]) {
  const requests: GenerateRequest[] = [];
  const generate = (request: GenerateRequest) => {
    requests.push(structuredClone(request));
    const events = new Channel<AnswerEvent>();
    events.put({ event: "accepted" });
    for (const [index, row] of said(request).entries())
      for (const [at, logprob] of row.entries()) {
        const token = request.labels?.[index]?.[at] ?? "";
        events.put({ event: "delta", index, text: token, score: { token, logprob, offset: 0, top: [] } });
      }
    const stats = { promptTokens: 5, cachedTokens: 0, completionTokens: 2, ttft: 1, decode: 1 };
    events.put({ event: "end", stats });
    return { events, abort: () => undefined };
  };
  return { generate, requests };
}

const parts = (asked: ReturnType<typeof source>) => ({
  source: asked,
  model: "m",
  promptOf,
  MAX_LABELS,
  MAX_LABEL_CHARS,
});

describe("decide", () => {
  const L = Math.log;

  test("gives the probabilities of labels, and their sums", async () => {
    const asked = source(() => [[L(0.6)], [L(0.5), L(0.4)]]);
    const made: Decision = await decide(parts(asked), [{ role: "user", content: "?" }], ["y", "no"], {});
    expect(made.choice).toBe("y");
    expect(made.options.map(({ probability }) => probability)).toEqual([
      expect.closeTo(0.75, 9),
      expect.closeTo(0.25, 9),
    ]);
    expect(made.options[1]?.logprob).toBeCloseTo(L(0.2), 9);
    expect(made).toMatchObject({ model: "m", prompt_tokens: 5, expected: null });
    expect(asked.requests[0]).toMatchObject({ labels: ["y", "no"], logprobs: 0, prompt: { kind: "chat" } });
  });

  test("has an expected value, and takes out what a neutral prompt prefers", async () => {
    const asked = source(({ prompt }) =>
      prompt.kind === "text" && prompt.text === "none" ? [[L(0.8)], [L(0.1)]] : [[L(0.6)], [L(0.3)]],
    );
    const made = await decide(parts(asked), "x", null, { values: [1, 3], neutral: "none" });
    expect(made.expected).toBeCloseTo(0.2 + 3 * 0.8, 9);
    expect(made.options.map(({ value }) => value)).toEqual([1, 3]);
  });

  test.each([
    [["a"], {}, "labels"],
    [["a", "a"], {}, "differ"],
    [["a", ""], {}, "characters"],
    [null, { values: [1, Number.NaN] }, "numbers"],
    [["a", "b"], { values: [1, 2] }, "not both"],
  ])("refuses %j %j", async (labels, options, said) => {
    await expect(decide(parts(source(() => [])), "x", labels, options)).rejects.toThrow(said);
  });
});

test("an answer is forced to be a label, whose tokens have the model's own log-probabilities", async () => {
  const backend = new FakeBackend();
  const core = new EngineCore(backend, [96]);
  const prompt = [5, 6, 7, 8, 9, 10];
  const params = { ...parseSampling({ temperature: 0 }, 0, 97), maxTokens: 3 };
  const ask = (tokens: readonly number[]): Promise<[number, TokenLogprobs | null][]> =>
    new Promise((resolve, reject) => {
      const told: [number, TokenLogprobs | null][] = [];
      const listener = {
        token: (token: number, logprobs: TokenLogprobs | null) => told.push([token, logprobs]) > 0,
        finish: () => resolve(told),
        fail: reject,
      };
      core.submit(prompt, { ...params, maxTokens: tokens.length }, listener, new Forced(tokens, 97));
    });
  const labels = [[40], [41, 42], [1, 2, 3], [95, 31, 32, 63]];
  const answers = await Promise.all(labels.map(ask));
  expect(answers.map((answer) => answer.map(([token]) => token))).toEqual(labels);
  expect(answers.flat().every(([, logprobs]) => Number.isFinite(logprobs?.logprob))).toBe(true);
});

test("labels are the tokens that the tokenizer adds to the prompt", () => {
  const codec = {
    encode: (text: string) => [...text.replaceAll("ab", "X")].map((letter) => letter.charCodeAt(0)),
  } as unknown as TextCodec;
  const asked = { end: "a", opened: false } as Parameters<typeof labelTokens>[1];
  expect(labelTokens(codec, asked, ["c", "b", "cab"])).toEqual([[99], [98], [99, 88]]);
  expect(() => labelTokens(codec, { ...asked, opened: true }, ["c"])).toThrow("reasoning");
});
