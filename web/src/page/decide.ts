import { abortReason, fromErrorRecord, RequestError, throwIfAborted } from "../protocol/errors.js";
import type { AnswerEvent, Prompt } from "../protocol/messages.js";
import type {
  Decision,
  DecisionOptions,
  DecisionPrompt,
  ReadPrompt,
  ReadPromptOptions,
} from "../protocol/openai.js";
import type { Channel } from "./channel.js";
import type { AnswerSource } from "./completions.js";
import { labelOdds } from "./label-odds.js";

/** What the model says of each label after a prompt. */
interface Scored {
  readonly tokens: string[];
  readonly logprobs: number[];
}

/** The scores of all labels after a prompt of `promptTokens` tokens. */
interface Asked {
  readonly labels: readonly Scored[];
  readonly promptTokens: number;
}

/** Parts of the engine: this file is loaded later, and an import of them would make a file of its own. */
export interface DecisionParts {
  readonly source: AnswerSource;
  readonly model: string;
  readonly promptOf: (
    prompt: DecisionPrompt,
    variables: DecisionOptions["chat_template_kwargs"],
    model: string,
  ) => Prompt;
  readonly MAX_LABELS: number;
  readonly MAX_LABEL_CHARS: number;
}

/** Decides between labels, or between numbers (`values`). See Engine.decide. */
export async function decide(
  parts: DecisionParts,
  prompt: DecisionPrompt,
  labels: readonly string[] | null,
  options: DecisionOptions,
): Promise<Decision> {
  const { values, neutral, chat_template_kwargs: variables } = options;
  const signal = options.signal ?? undefined;
  const { source, model, promptOf } = parts;
  const texts = checked(labels, values ?? null, parts);
  const first = promptOf(prompt, variables, model);
  const second = neutral == null ? null : promptOf(neutral, variables, model);
  throwIfAborted(signal);
  const own = await score(source, first, texts, signal);
  const before = second && (await score(source, second, texts, signal));
  const sums = sumsOf(own);
  const odds = labelOdds(
    own.labels.map(({ tokens }) => tokens),
    sums,
    before && sumsOf(before),
  );
  const made = own.labels.map(({ logprobs }, at) => ({
    label: texts[at] ?? "",
    value: values?.[at] ?? null,
    probability: odds.probabilities[at] ?? 0,
    logprob: sums[at] ?? 0,
    token_logprobs: logprobs,
  }));
  return {
    choice: texts[odds.choice] ?? "",
    confidence: odds.confidence,
    options: made,
    expected: values
      ? made.reduce((sum, { value, probability }) => sum + (value ?? 0) * probability, 0)
      : null,
    model,
    prompt_tokens: own.promptTokens,
  };
}

function sumsOf({ labels }: Asked): number[] {
  return labels.map(({ logprobs }) => logprobs.reduce((sum, each) => sum + each, 0));
}

/** The texts of labels or values. Throws RequestError unless they are two or more different ones. */
function checked(
  labels: readonly string[] | null,
  values: readonly number[] | null,
  { MAX_LABELS, MAX_LABEL_CHARS }: DecisionParts,
): string[] {
  const name = values ? "values" : "labels";
  if (labels && values) throw new RequestError("give labels or values, not both", name);
  const given: readonly unknown[] | null = values ?? labels;
  if (!Array.isArray(given) || given.length < 2 || given.length > MAX_LABELS)
    throw new RequestError(`${name} must be a list of 2 to ${MAX_LABELS}`, name);
  const kind = values ? "number" : "string";
  if (given.some((one) => typeof one !== kind || (kind === "number" && !Number.isFinite(one))))
    throw new RequestError(`${name} must be ${kind}s`, name);
  const texts = given.map(String);
  if (texts.some(({ length }) => length < 1 || length > MAX_LABEL_CHARS))
    throw new RequestError(`a label must have 1 to ${MAX_LABEL_CHARS} characters`, name);
  if (new Set(texts).size < texts.length) throw new RequestError(`${name} must differ from each other`, name);
  return texts;
}

/** Asks the worker for answers that are the labels, and collects their log-probabilities. */
async function score(
  source: AnswerSource,
  prompt: Prompt,
  labels: readonly string[],
  signal: AbortSignal | undefined,
): Promise<Asked> {
  const found = labels.map((): Scored => ({ tokens: [], logprobs: [] }));
  const asked = source.generate({ prompt, labels, n: 1, logprobs: 0, options: {} });
  try {
    for (;;) {
      const event = await nextOf(asked.events, signal);
      if (event.event === "end") return { labels: found, promptTokens: event.stats.promptTokens };
      if (event.event !== "delta" || !event.score) continue;
      found[event.index]?.tokens.push(event.score.token);
      found[event.index]?.logprobs.push(event.score.logprob);
    }
  } finally {
    asked.abort();
  }
}

/** Reads a prompt. See Engine.readPrompt. */
export async function readPrompt(
  { source, model, promptOf }: Pick<DecisionParts, "source" | "model" | "promptOf">,
  prompt: DecisionPrompt,
  { tokens = [], perplexity = false, hold = false, chat_template_kwargs, signal }: ReadPromptOptions,
): Promise<ReadPrompt> {
  const reading = { tokens: [...tokens], perplexity };
  const read = promptOf(prompt, chat_template_kwargs, model);
  throwIfAborted(signal ?? undefined);
  const asked = source.generate({ prompt: read, reading, n: 1, logprobs: null, options: {} });
  let held = false;
  try {
    for (;;) {
      const event = await nextOf(asked.events, signal ?? undefined);
      if (event.event !== "read") continue;
      held = hold && signal?.aborted === false;
      if (held) signal?.addEventListener("abort", asked.abort, { once: true });
      const { top, logprobs, promptLogprob, stats } = event;
      return { prompt_tokens: stats.promptTokens, top, logprobs, prompt_logprob: promptLogprob };
    }
  } finally {
    if (!held) asked.abort();
  }
}

/** The next event. Throws the error that it may be, or the reason of `signal`. */
async function nextOf(events: Channel<AnswerEvent>, signal: AbortSignal | undefined): Promise<AnswerEvent> {
  const left = new AbortController();
  try {
    const event = await new Promise<AnswerEvent>((resolve, reject) => {
      const onAbort = (): void => reject(abortReason(signal));
      if (signal?.aborted) onAbort();
      signal?.addEventListener("abort", onAbort, { once: true, signal: left.signal });
      events.take().then(resolve, reject);
    });
    if (event.event === "error") throw fromErrorRecord(event.error);
    return event;
  } finally {
    left.abort();
  }
}
