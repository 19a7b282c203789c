/** What the device's model shows about a prompt when it has read it, before it answers. */

import { DeviceError, throwIfAborted } from "../protocol/errors.js";
import type { ChatCompletionRequest, ChatMessage } from "../protocol/openai.js";
import { type DeviceEngine, messagesOf } from "./device.js";
import type { HybridRequest } from "./openai.js";
import { childController, within } from "./wait.js";

/** The question to the model itself. Python asks the same one; a shared vector holds both to it. */
export const SURE = "Can you answer this correctly? Reply with one word, Yes or No.";
export const ANSWERS = ["Yes", "No"] as const;
/** The most alternatives that an engine reports. */
const TOP = 20;

/** What a model shows about a prompt. Logarithms are natural. */
export interface Knowledge {
  readonly prompt_tokens: number;
  /** Log-probabilities of the likeliest first tokens of the answer, in descending order. */
  readonly top: readonly number[];
  /** The mean log-probability of the prompt's last tokens; engines in browsers do not tell it. */
  readonly prompt_logprob: number | null;
  /** The log-odds of Yes when the model is asked whether it can answer; null if it was not asked. */
  readonly sure: number | null;
}

/**
 * Reads a prompt, whose pages stay in the cache for the answer. Null for prompts with tools, and where the engine
 * fails or takes more than `seconds`: its own answer will show why. `ask`: also asks the model whether it can
 * answer.
 */
export async function knowledgeOf(
  engine: DeviceEngine,
  request: HybridRequest,
  ask: boolean,
  seconds: number,
): Promise<Knowledge | null> {
  if (request.tools?.length) return null;
  const signal = request.signal ?? undefined;
  throwIfAborted(signal);
  const { chat_template_kwargs } = request;
  const reading = childController(signal ?? new AbortController().signal);
  const more = { signal: reading.signal, ...(chat_template_kwargs && { chat_template_kwargs }) };
  const read = async (): Promise<Knowledge | null> => {
    const messages = messagesOf(request);
    const first = await firstToken(engine, { ...more, messages });
    return first && { ...first, prompt_logprob: null, sure: ask ? await sure(engine, messages, more) : null };
  };
  try {
    return await within(read(), seconds, () => new DeviceError("The device is silent."), signal);
  } catch {
    throwIfAborted(signal);
    return null;
  } finally {
    reading.abort();
  }
}

/** One token of an answer, of which only the alternatives count: no penalty may change them. */
async function firstToken(
  engine: DeviceEngine,
  request: Pick<ChatCompletionRequest, "messages">,
): Promise<Pick<Knowledge, "prompt_tokens" | "top"> | null> {
  const plain = { temperature: 0, repetition_penalty: 1, presence_penalty: 0, frequency_penalty: 0 };
  const one = { max_tokens: 1, ignore_eos: true, logprobs: true, top_logprobs: TOP };
  const stream = { stream: true, stream_options: { include_usage: true } } as const;
  let top: readonly number[] | null = null;
  let prompt_tokens: number | null = null;
  for await (const { choices, usage } of await engine.chat.completions.create({
    ...request,
    ...plain,
    ...one,
    ...stream,
  })) {
    const [token] = choices[0]?.logprobs?.content ?? [];
    if (token) top ??= token.top_logprobs.map(({ logprob }) => logprob).sort((a, b) => b - a);
    prompt_tokens = usage?.prompt_tokens ?? prompt_tokens;
  }
  return top && prompt_tokens !== null ? { top, prompt_tokens } : null;
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
