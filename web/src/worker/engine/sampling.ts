import { MAX_STOPS, type SamplingDefaultsRecord, TOP_LOGPROBS } from "../../format/constants.js";
import { RequestError } from "../../protocol/errors.js";
import type { SamplingOptions } from "../../protocol/openai.js";

/** Checked parameters of sampling. Their bounds and defaults are those of Python's `SamplingParams`. */
export interface SamplingParams {
  /** The most tokens of the answer; null: until the context is full. */
  readonly maxTokens: number | null;
  readonly temperature: number;
  readonly topP: number;
  /** 0 turns it off. */
  readonly topK: number;
  readonly minP: number;
  readonly repetitionPenalty: number;
  readonly presencePenalty: number;
  readonly frequencyPenalty: number;
  readonly logitBias: ReadonlyMap<number, number>;
  /** 64 bits; random if the caller gave none. */
  readonly seed: bigint;
  readonly stop: readonly string[];
  /**
   * How many alternatives to give beside the chosen token's own log-probability; null: no log-probabilities.
   */
  readonly logprobs: number | null;
  /** Continue at the end token (for benchmarks). */
  readonly ignoreEos: boolean;
}

const MAX_INT = 2 ** 31 - 1;

/**
 * Checks the options of a request; throws RequestError that names the first wrong parameter. `wanted` has the
 * model's own values for parameters that the request omits.
 */
export function parseSampling(
  options: SamplingOptions,
  logprobs: number | null,
  vocabSize: number,
  wanted: SamplingDefaultsRecord = {},
): SamplingParams {
  const { max_tokens: maxTokens, seed } = options;
  return {
    maxTokens: maxTokens == null ? null : whole("max_tokens", maxTokens, 1, MAX_INT),
    temperature: inRange("temperature", options.temperature ?? wanted.temperature ?? 1, 0, 100),
    topP: inRange("top_p", options.top_p ?? wanted.top_p ?? 1, 0, 1, true),
    topK: whole("top_k", options.top_k ?? wanted.top_k ?? 0, 0, MAX_INT),
    minP: inRange("min_p", options.min_p ?? wanted.min_p ?? 0, 0, 1),
    repetitionPenalty: inRange(
      "repetition_penalty",
      options.repetition_penalty ?? wanted.repetition_penalty ?? 1,
      0,
      100,
      true,
    ),
    presencePenalty: inRange("presence_penalty", options.presence_penalty ?? 0, -2, 2),
    frequencyPenalty: inRange("frequency_penalty", options.frequency_penalty ?? 0, -2, 2),
    logitBias: parseBias(options.logit_bias ?? {}, vocabSize),
    seed: seed == null ? randomSeed() : parseSeed(seed),
    stop: parseStop(options.stop ?? []),
    logprobs: logprobs === null ? null : whole("top_logprobs", logprobs, 0, TOP_LOGPROBS),
    ignoreEos: options.ignore_eos ?? false,
  };
}

/** Whether the choice depends on earlier tokens of the sequence. */
export function isPenalized(params: SamplingParams): boolean {
  return params.repetitionPenalty !== 1 || params.presencePenalty !== 0 || params.frequencyPenalty !== 0;
}

/** Whether the choice is the argmax of the raw logits. */
export function isPlainGreedy(params: SamplingParams): boolean {
  return params.temperature === 0 && !isPenalized(params) && params.logitBias.size === 0;
}

function inRange(param: string, value: number, low: number, high: number, above = false): number {
  // The comparison also fails for NaN and for values of other types that untyped callers may send.
  const fits = typeof value === "number" && value <= high && (above ? value > low : value >= low);
  if (!fits)
    throw new RequestError(
      `${param} must be a number in ${above ? "(" : "["}${low}, ${high}], not ${value}`,
      param,
    );
  return value;
}

function whole(param: string, value: number, low: number, high: number): number {
  if (!Number.isInteger(value))
    throw new RequestError(`${param} must be a whole number, not ${value}`, param);
  if (value < low || value > high)
    throw new RequestError(`${param} must be at least ${low} and at most ${high}, not ${value}`, param);
  return value;
}

function parseSeed(seed: number | bigint): bigint {
  if (typeof seed !== "bigint" && !Number.isSafeInteger(seed))
    throw new RequestError(`seed must be a whole number, not ${seed}; give large ones as bigint`, "seed");
  const wide = BigInt(seed);
  if (wide < -(2n ** 63n) || wide >= 2n ** 64n)
    throw new RequestError(`seed must fit 64 bits, not ${seed}`, "seed");
  return BigInt.asUintN(64, wide);
}

function randomSeed(): bigint {
  return crypto.getRandomValues(new BigUint64Array(1))[0] ?? 0n;
}

function parseStop(stop: string | readonly string[]): readonly string[] {
  const list: readonly unknown[] = typeof stop === "string" ? [stop] : stop;
  if (!Array.isArray(list) || !list.every((item) => typeof item === "string"))
    throw new RequestError(`stop must be strings, not ${JSON.stringify(stop)}`, "stop");
  if (list.length > MAX_STOPS)
    throw new RequestError(`stop takes at most ${MAX_STOPS} strings, not ${list.length}`, "stop");
  if (list.includes("")) throw new RequestError("stop must not contain an empty string", "stop");
  return list;
}

function parseBias(bias: Readonly<Record<string, number>>, vocabSize: number): ReadonlyMap<number, number> {
  const entries = Object.entries(bias).map(([key, value]): [number, number] => {
    const token = whole("logit_bias", key.trim() === "" ? Number.NaN : Number(key), 0, MAX_INT);
    if (token >= vocabSize)
      throw new RequestError(
        `logit_bias: token id ${token} is outside the vocabulary of ${vocabSize} tokens`,
        "logit_bias",
      );
    return [token, inRange("logit_bias", value, -100, 100)];
  });
  return new Map(entries);
}
