/**
 * A router that was fitted to outcomes: a small JSON model of what the device's model shows about a prompt, and
 * about the first tokens of its answer. `nearfar route fit` makes it. The Python version is the same; both pass
 * the shared vectors. A chunk of its own, which a client with a router loads.
 */

import { meant, RequestError } from "../protocol/errors.js";
import type { Knowledge, Wanted } from "./knowledge.js";
import { entropy, FIRST_TOKENS, type First } from "./monitor.js";
import type { Probe, Regression, RouterModel } from "./router-model.js";
import { type Reason, reason } from "./types.js";

export { knowledgeOf } from "./knowledge.js";

const FORMAT = "nearfar-router";
const VERSION = 2;
const PROMPT_FEATURES = ["length", "entropy", "best", "margin", "prompt_logprob", "sure"];
const ANSWER_FEATURES = ["mean_logprob", "lowest_logprob", "mean_entropy", "highest_entropy"];
const FIELDS = "format version model artifact examples prompt threshold answer limit tokens curve".split(" ");
const OF_REGRESSION = "features mean scale weights bias auroc probe".split(" ");
const OF_PROBE = "tokens weights mean".split(" ");
const OF_POINT = "share threshold limit quality money".split(" ");

/** Tokens whose log-probabilities show the last hidden row. */
const ROW_TOKENS = 128;

type Features = Readonly<Record<string, number | null>>;

/** A router that was read and checked. */
export class FittedRouter {
  constructor(readonly model: RouterModel) {}

  /** What must be known about a prompt. */
  get wanted(): Wanted {
    const { prompt, answer } = this.model;
    const parts = answer === null ? [prompt] : [prompt, answer];
    const looks = (name: string): boolean => parts.some(({ features }) => features.includes(name));
    const tokens = [...new Set(parts.flatMap(({ probe }) => probe?.tokens ?? []))];
    return { ask: looks("sure"), perplexity: looks("prompt_logprob"), tokens };
  }

  /** The probability that the cloud answers better. */
  gain(knowledge: Knowledge): number {
    return probability(this.model.prompt, promptFeatures(knowledge), knowledge.row);
  }

  /**
   * Why the cloud should answer instead, when the device's answer began with these tokens; null: it should not.
   * It is judged once, at the last of the `tokens` first tokens, or where it `ended` earlier.
   */
  doubt(knowledge: Knowledge, first: readonly First[], ended: boolean): Reason | null {
    const { answer, limit, tokens } = this.model;
    const due = ended ? first.length > 0 && first.length < tokens : first.length === tokens;
    if (answer === null || limit === null || !due) return null;
    const values = { ...promptFeatures(knowledge), ...answerFeatures(first) };
    const found = probability(answer, values, knowledge.row);
    return found >= limit ? reason("doubtful", "device", found, limit) : null;
  }

  /** Throws RequestError if the router was fitted to another artifact. */
  check(artifact: string, model: string): void {
    if (artifact === this.model.artifact) return;
    throw new RequestError(
      `the router was fitted to ${named(this.model.model, this.model.artifact)}, but the device runs ` +
        `${named(model, artifact)}: fit a router to this model with nearfar route fit`,
      "router",
    );
  }
}

/** What is recorded about a prompt, for routers of all kinds. */
export function wantedForRecords(vocabSize: number): Wanted {
  return { ask: false, perplexity: true, tokens: rowTokens(vocabSize) };
}

/** The tokens whose log-probabilities are recorded for a probe: evenly spaced in the vocabulary. */
export function rowTokens(vocabSize: number): number[] {
  const step = Math.max(Math.floor(vocabSize / ROW_TOKENS), 1);
  return Array.from({ length: Math.min(ROW_TOKENS, vocabSize) }, (_, at) => at * step);
}

/** Loads a router from its address, or takes its JSON. Throws RequestError for anything that is not a router. */
export async function loadRouter(source: RouterModel | string): Promise<FittedRouter> {
  if (typeof source !== "string") return parseRouter(source);
  let data: unknown;
  try {
    const response = await fetch(source);
    if (!response.ok) throw new Error(`HTTP ${response.status}`);
    data = await response.json();
  } catch (error) {
    throw noRouter(source, error instanceof Error ? error.message : String(error));
  }
  return parseRouter(data, source);
}

/** Reads the JSON form. `name`: what messages call it. Throws RequestError for another form. */
export function parseRouter(data: unknown, name = "this object"): FittedRouter {
  const wrong = wrongIn(data);
  if (wrong !== null) throw noRouter(name, wrong);
  return new FittedRouter(data as RouterModel);
}

function noRouter(name: string, why: string): RequestError {
  return new RequestError(`${name} is not a router: ${why}; make one with nearfar route fit`, "router");
}

function named(model: string, artifact: string): string {
  const [checkpoint = "", scheme = ""] = artifact.split("/");
  const shown = checkpoint.slice(0, 12) || "unknown";
  return `${model || "a model"} (checkpoint ${shown}, ${scheme || "unknown scheme"})`;
}

function promptFeatures({ prompt_tokens, top, prompt_logprob, sure }: Knowledge): Features {
  const [best = null, second] = top;
  return {
    length: Math.log(Math.max(prompt_tokens, 1)),
    entropy: entropy(top),
    best,
    margin: best === null || second === undefined ? null : best - second,
    prompt_logprob,
    sure,
  };
}

function answerFeatures(first: readonly First[]): Features {
  const logprobs = first.map(([logprob]) => logprob);
  const entropies = first.map(([, entropy]) => entropy);
  return {
    mean_logprob: mean(logprobs),
    lowest_logprob: Math.min(...logprobs),
    mean_entropy: mean(entropies),
    highest_entropy: Math.max(...entropies),
  };
}

function mean(values: readonly number[]): number {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

/** Logistic regression; a missing feature counts as its mean. */
function probability(
  { features, mean, scale, weights, bias, probe }: Regression,
  values: Features,
  row: Knowledge["row"],
): number {
  const total = features.reduce(
    (sum, name, at) => {
      const value = values[name] ?? null;
      const weight = weights[at] ?? 0;
      return value === null ? sum : sum + (weight * (value - (mean[at] ?? 0))) / (scale[at] ?? 1);
    },
    bias + (probe === null ? 0 : probed(probe, row)),
  );
  return 1 / (1 + Math.exp(-Math.min(Math.max(total, -500), 500)));
}

/** A probe's term in a regression; 0 where the row lacks one of its tokens. */
function probed({ tokens, weights, mean: middle }: Probe, row: Knowledge["row"]): number {
  const known = new Map(row);
  const shown = tokens.flatMap((token) => known.get(token) ?? []);
  if (shown.length < tokens.length) return 0;
  const level = mean(shown);
  return shown.reduce((sum, each, at) => sum + (weights[at] ?? 0) * (each - level), -middle);
}

type Fields = Readonly<Record<string, unknown>>;

/** Describes what is wrong with the JSON of a router; null if it is one. */
function wrongIn(data: unknown): string | null {
  const wrong = notExactly(data, FIELDS, "it");
  if (wrong !== null) return wrong;
  const { format, version, model, artifact, prompt, threshold, answer, limit, tokens, curve } =
    data as Fields;
  if (format !== FORMAT || version !== VERSION)
    return `it has not the format ${FORMAT} of version ${VERSION}`;
  if (typeof model !== "string" || typeof artifact !== "string") return "model and artifact must be texts";
  if (!isNumber(threshold) || !(limit === null || isNumber(limit)))
    return "threshold and limit must be numbers";
  if (!Number.isInteger(tokens) || Number(tokens) < 1 || Number(tokens) > FIRST_TOKENS)
    return `tokens must be from 1 to ${FIRST_TOKENS}`;
  if (limit !== null && answer === null) return "it has a limit, but no answer";
  if (!Array.isArray(curve) || curve.length === 0) return "its curve must be a list of points";
  return (
    wrongRegression(prompt, "prompt", PROMPT_FEATURES) ??
    (answer === null ? null : wrongRegression(answer, "answer", [...PROMPT_FEATURES, ...ANSWER_FEATURES])) ??
    curve.map(wrongPoint).find((each) => each !== null) ??
    null
  );
}

function wrongPoint(point: unknown): string | null {
  const wrong = notExactly(point, OF_POINT, "a point");
  if (wrong !== null) return wrong;
  const { share, threshold, limit, quality, money } = point as Fields;
  const whole = [share, threshold, quality].every(isNumber);
  return whole && [limit, money].every((each) => each === null || isNumber(each))
    ? null
    : "a point must have numbers";
}

function wrongRegression(data: unknown, what: string, known: readonly string[]): string | null {
  const wrong = notExactly(data, OF_REGRESSION, what);
  if (wrong !== null) return wrong;
  const { features, mean, scale, weights, bias, auroc, probe } = data as Fields;
  const lists: readonly unknown[] = [features, mean, scale, weights];
  const first = features as readonly string[];
  if (!lists.every((each) => Array.isArray(each) && each.length === first.length))
    return `${what}: features, mean, scale and weights must be lists of one length`;
  const strange = first.find((name) => !known.includes(name));
  if (strange !== undefined)
    return `${what} looks at "${strange}", which this version does not know${meant(strange, known)}`;
  const numbers = [mean, scale, weights].flatMap((each) => each as readonly unknown[]);
  if (![...numbers, bias, auroc].every(isNumber)) return `${what}: not all its numbers are finite`;
  const scales = scale as readonly number[];
  if (!scales.every((each) => each > 0)) return `${what}: a scale must be positive`;
  return probe === null ? null : wrongProbe(probe);
}

function wrongProbe(data: unknown): string | null {
  const wrong = notExactly(data, OF_PROBE, "a probe");
  if (wrong !== null) return wrong;
  const { tokens, weights, mean } = data as Fields;
  if (!Array.isArray(tokens) || !Array.isArray(weights) || tokens.length !== weights.length)
    return "a probe must have as many weights as tokens";
  const ids = tokens.every((each) => Number.isInteger(each) && each >= 0) && new Set(tokens).size;
  return ids === tokens.length && ids > 0 && [...weights, mean].every(isNumber)
    ? null
    : "a probe must have ids of different tokens and finite numbers";
}

function notExactly(data: unknown, names: readonly string[], what: string): string | null {
  const given =
    typeof data === "object" && data !== null && !Array.isArray(data) ? Object.keys(data) : ([] as string[]);
  const wrong = [
    ...names.filter((name) => !given.includes(name)),
    ...given.filter((name) => !names.includes(name)),
  ];
  return wrong.length === 0
    ? null
    : `${what} must be an object with exactly its fields (missing or unknown: ${wrong.sort().join(", ")})`;
}

function isNumber(value: unknown): boolean {
  return typeof value === "number" && Number.isFinite(value);
}
