import { describe, expect, test } from "vitest";
import { RequestError } from "../src/protocol/errors.js";
import type { SamplingOptions } from "../src/protocol/openai.js";
import { isPlainGreedy, parseSampling } from "../src/worker/engine/sampling.js";

const parse = (options: SamplingOptions, logprobs: number | null = null) =>
  parseSampling(options, logprobs, 100);

describe("sampling parameters", () => {
  test("have OpenAI's defaults", () => {
    const { seed, ...rest } = parse({ temperature: null });
    expect(rest).toMatchObject({
      temperature: 1,
      topP: 1,
      topK: 0,
      minP: 0,
      maxTokens: null,
      logprobs: null,
      stop: [],
    });
    expect(parse({}).seed).not.toBe(seed);
  });

  test("are the model's where a request does not say", () => {
    const model = { temperature: 0.6, top_k: 20, repetition_penalty: 1.1 };
    expect(parseSampling({ top_k: 0, temperature: null }, null, 100, model)).toMatchObject({
      temperature: 0.6,
      topK: 0,
      topP: 1,
      repetitionPenalty: 1.1,
    });
    expect(() => parseSampling({}, null, 100, { top_p: 2 })).toThrow(
      "top_p must be a number in (0, 1], not 2",
    );
  });

  test("keep 64 bits of the seed", () => {
    expect(parse({ seed: -1 }).seed).toBe(2n ** 64n - 1n);
    expect(parse({ seed: 2n ** 63n }).seed).toBe(2n ** 63n);
  });

  test("know plain greedy", () => {
    expect(isPlainGreedy(parse({ temperature: 0 }))).toBe(true);
    expect(isPlainGreedy(parse({ temperature: 0, presence_penalty: 0.1 }))).toBe(false);
    expect(isPlainGreedy(parse({ temperature: 0, logit_bias: { 3: 1 } }))).toBe(false);
  });

  const wrong: [keyof SamplingOptions, unknown][] = [
    ["temperature", -0.1],
    ["temperature", Number.NaN],
    ["temperature", Number.POSITIVE_INFINITY],
    ["temperature", "1"],
    ["top_p", 0],
    ["top_p", 1.01],
    ["top_p", Number.NaN],
    ["top_k", -1],
    ["top_k", 1.5],
    ["min_p", -0.5],
    ["min_p", 2],
    ["max_tokens", 0],
    ["max_tokens", 1.5],
    ["repetition_penalty", 0],
    ["presence_penalty", 2.1],
    ["frequency_penalty", -2.1],
    ["seed", 1.5],
    ["seed", 2n ** 64n],
    ["stop", [""]],
    ["stop", [1]],
    ["stop", Array.from({ length: 17 }, (_, i) => `${i}`)],
    ["logit_bias", { 100: 1 }],
    ["logit_bias", { x: 1 }],
    ["logit_bias", { 1: 101 }],
    ["logit_bias", { 1: Number.NaN }],
  ];
  test.each(wrong)("refuse %s: %s", (param, value) => {
    try {
      parse({ [param]: value } as SamplingOptions);
      expect.unreachable();
    } catch (error) {
      expect(error).toBeInstanceOf(RequestError);
      expect(error).toMatchObject({ param, code: "invalid-request" });
    }
  });

  test("refuse more than 20 alternatives", () => {
    expect(() => parse({}, 21)).toThrow(/top_logprobs must be at least 0 and at most 20, not 21/);
  });
});
