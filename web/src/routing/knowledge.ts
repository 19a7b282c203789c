/** What the device's model shows about a prompt when it has read it, before it answers. */

import { DeviceError, throwIfAborted } from "../protocol/errors.js";
import type { ChatMessage } from "../protocol/openai.js";
import { type DeviceEngine, messagesOf } from "./device.js";
import type { HybridRequest } from "./openai.js";
import { childController, within } from "./wait.js";

/** The question to the model itself. Python asks the same one; a shared vector holds both to it. */
export const SURE = "Can you answer this correctly? Reply with one word, Yes or No.";
export const ANSWERS = ["Yes", "No"] as const;

/** What a model shows about a prompt. Logarithms are natural. */
export interface Knowledge {
  readonly prompt_tokens: number;
  /** Log-probabilities of the likeliest first tokens of the answer, in descending order. */
  readonly top: readonly number[];
  /** The mean log-probability of some of the prompt's last tokens; null if they were in the cache, or not wanted. */
  readonly prompt_logprob: number | null;
  /** The log-odds of Yes when the model is asked whether it can answer; null if it was not asked. */
  readonly sure: number | null;
  /**
   * Ids of tokens with their log-probabilities as the first token, to 4 digits: the last hidden row as the output
   * matrix shows it.
   */
  readonly row: readonly (readonly [token: number, logprob: number])[];
}

/** What is wanted of a prompt. */
export interface Wanted {
  /** Whether the model is asked whether it can answer. */
  readonly ask: boolean;
  /** Whether `prompt_logprob` is wanted. */
  readonly perplexity: boolean;
  /** The tokens of `row`. */
  readonly tokens: readonly number[];
}

/** What a model shows about a prompt, which stays in its cache until `release`. */
export interface HeldPrompt {
  readonly knowledge: Knowledge;
  readonly release: () => void;
}

/**
 * Reads a prompt, which stays in the cache for the answer until it is released. Null for prompts with tools, for engines without
 * `readPrompt`, and where the engine fails or takes more than `seconds`: its own answer will show why.
 */
export async function knowledgeOf(
  engine: DeviceEngine,
  request: HybridRequest,
  wanted: Wanted,
  seconds: number,
): Promise<HeldPrompt | null> {
  if (request.tools?.length) return null;
  const signal = request.signal ?? undefined;
  throwIfAborted(signal);
  const reading = childController(signal ?? new AbortController().signal);
  const release = (): void => reading.abort();
  try {
    const shown = read(engine, request, wanted, reading.signal);
    const late = (): Error => new DeviceError("The device is silent.");
    const knowledge = await within(shown, seconds, late, signal);
    if (knowledge) return { knowledge, release };
  } catch {
    throwIfAborted(signal);
  }
  release();
  return null;
}

async function read(
  engine: DeviceEngine,
  request: HybridRequest,
  { ask, perplexity, tokens }: Wanted,
  signal: AbortSignal,
): Promise<Knowledge | null> {
  const { chat_template_kwargs } = request;
  const more = { signal, ...(chat_template_kwargs && { chat_template_kwargs }) };
  const messages = messagesOf(request);
  const read = await engine.readPrompt?.(messages, { ...more, tokens, perplexity, hold: true });
  if (!read) return null;
  const { prompt_tokens, top, prompt_logprob, logprobs } = read;
  const row = tokens.map((token, at) => [token, Math.round((logprobs[at] ?? 0) * 1e4) / 1e4] as const);
  return { prompt_tokens, top, prompt_logprob, sure: ask ? await sure(engine, messages, more) : null, row };
}

/** The log-odds of Yes, as the user's next words after the conversation. */
async function sure(
  engine: DeviceEngine,
  messages: readonly ChatMessage[],
  options: object,
): Promise<number | null> {
  const last = messages.at(-1);
  if (!engine.decide || last?.role !== "user" || typeof last.content !== "string") return null;
  const asked = [...messages.slice(0, -1), { ...last, content: `${last.content}\n\n${SURE}` }];
  const { options: found } = await engine.decide(asked, ANSWERS, options);
  const yes = Math.min(Math.max(found[0]?.probability ?? 0, 1e-9), 1 - 1e-9);
  return Math.log(yes / (1 - yes));
}
