/**
 * Checks OpenAI's requests where they are made: unsupported parameters are rejected by name, never left out.
 */

import { MAX_LISTED, MAX_VARIABLES, TOP_LOGPROBS } from "../format/constants.js";
import { meant, RequestError } from "../protocol/errors.js";
import type { Prompt } from "../protocol/messages.js";
import type {
  ChatCompletionRequest,
  CompletionRequest,
  DecisionOptions,
  DecisionPrompt,
  MessageParam,
} from "../protocol/openai.js";
import type { Prepared } from "./completions.js";
import { checkedMessages } from "./conversation.js";
import { grammarOf } from "./formats.js";
import { checkedCalling } from "./tools.js";
import { isFlag, isRecord, shown } from "./values.js";

/**
 * A kind of value: its name, and whether a value is one. Ranges are checked in the worker, where the model is
 * known.
 */
export type ValueKind = readonly [name: string, fits: (value: unknown) => boolean];

export const NUMBER: ValueKind = ["a number", (value) => typeof value === "number"];
export const FLAG: ValueKind = ["true or false", (value) => typeof value === "boolean"];
const COUNT: ValueKind = [
  "a whole number, at least 1",
  (value) => Number.isInteger(value) && Number(value) >= 1,
];
export const TEXT: ValueKind = ["a string", (value) => typeof value === "string"];
/**
 * How many alternatives to give. It is checked here, because an error of the worker would name the parameter
 * of chats.
 */
const RANKED: ValueKind = [
  `0 to ${TOP_LOGPROBS}`,
  (value) => Number.isInteger(value) && Number(value) >= 0 && Number(value) <= TOP_LOGPROBS,
];
const LIST: ValueKind = ["a list of at least one { role, content }", (value) => Array.isArray(value)];
const SEED: ValueKind = ["a whole number", (value) => typeof value === "number" || typeof value === "bigint"];
const STOP: ValueKind = [
  "a string or a list of strings",
  (value) => [value].flat().every((item) => typeof item === "string"),
];
const BIAS: ValueKind = [
  "an object of token ids and numbers",
  (value) =>
    isRecord(value) &&
    Object.entries(value).every(([token, bias]) => /^\d+$/.test(token) && typeof bias === "number"),
];
const STREAM: ValueKind = [
  "{ include_usage: true or false }",
  (value) =>
    isRecord(value) &&
    Object.entries(value).every(([name, on]) => name === "include_usage" && isFlag(on ?? false)),
];
/** The signal is checked by its shape, because it may come from another realm or a library. */
export const SIGNAL: ValueKind = ["an AbortSignal", (value) => isRecord(value) && "aborted" in value];
export const POLICY: ValueKind = [
  '"error", "truncate-oldest" or a function',
  (value) => value === "error" || value === "truncate-oldest" || typeof value === "function",
];
const TOOLS: ValueKind = ['a list of { type: "function", function }', Array.isArray];
const CHOICE: ValueKind = [
  '"none", "auto", "required" or { type: "function", function: { name } }',
  (value) => ["none", "auto", "required"].includes(value as string) || isRecord(value),
];

const FORMAT: ValueKind = [
  "an object with a type",
  (value) => isRecord(value) && typeof value.type === "string",
];

/** edge_runtime/openai/parameters.py allows the same variables. */
const VARIABLES: ValueKind = [
  `at most ${MAX_VARIABLES} variables by name: texts, numbers, booleans, or lists of at most ${MAX_LISTED}`,
  (value) =>
    isRecord(value) &&
    Object.keys(value).length <= MAX_VARIABLES &&
    Object.entries(value).every(([name, one]) => /^[\w.-]{1,64}$/.test(name) && isVariable(one)),
];

function isVariable(value: unknown): boolean {
  const listed: unknown[] = Array.isArray(value) ? value : [value];
  return (
    listed.length <= MAX_LISTED && listed.every((one) => ["string", "number", "boolean"].includes(typeof one))
  );
}

const COMMON = {
  model: TEXT,
  /** The user is meaningful only to a service that bills many people. */
  user: TEXT,
  n: NUMBER,
  stream: FLAG,
  stream_options: STREAM,
  signal: SIGNAL,
  max_tokens: NUMBER,
  temperature: NUMBER,
  top_p: NUMBER,
  top_k: NUMBER,
  min_p: NUMBER,
  repetition_penalty: NUMBER,
  presence_penalty: NUMBER,
  frequency_penalty: NUMBER,
  logit_bias: BIAS,
  seed: SEED,
  stop: STOP,
  ignore_eos: FLAG,
  response_format: FORMAT,
};
const CHAT = {
  ...COMMON,
  messages: LIST,
  max_completion_tokens: COUNT,
  logprobs: FLAG,
  top_logprobs: NUMBER,
  continue_final_message: FLAG,
  chat_template_kwargs: VARIABLES,
  context_policy: POLICY,
  tools: TOOLS,
  tool_choice: CHOICE,
  parallel_tool_calls: FLAG,
};
const PROMPT: ValueKind = [
  "a string or token ids",
  (value) => TEXT[1](value) || (Array.isArray(value) && value.length > 0 && value.every(Number.isInteger)),
];
const PLAIN = { ...COMMON, prompt: PROMPT, logprobs: RANKED, echo: FLAG, best_of: NUMBER };

/** OpenAI's parameters that this engine does not support, with the values that have no effect. */
const LACKING: Readonly<Record<string, readonly unknown[]>> = {
  functions: ["[]"],
  function_call: ['"none"', '"auto"'],
  reasoning_effort: ['"none"'],
  modalities: ['["text"]'],
  audio: [],
  prediction: [],
  web_search_options: [],
  store: ["false"],
  echo: ["false"],
  suffix: ['""'],
  best_of: ["1"],
};

/** Parses a chat request. `model`: the loaded one. Throws RequestError naming the first wrong parameter. */
export function prepareChat(request: ChatCompletionRequest, model: string): Prepared {
  check(request, CHAT, model);
  const { max_completion_tokens, logprobs, top_logprobs, continue_final_message, ...others } = request;
  const { messages: given, tools, tool_choice, parallel_tool_calls, response_format, ...more } = others;
  const { chat_template_kwargs: variables, ...rest } = more;
  const grammar = response_format == null ? null : grammarOf(response_format);
  const messages = checkedMessages(given);
  const calling = checkedCalling({ tools, tool_choice, parallel_tool_calls });
  const continueLast = continue_final_message ?? false;
  if (continueLast && messages.at(-1)?.role !== "assistant")
    throw new RequestError("continue_final_message needs a last message of the role assistant", "messages");
  if (top_logprobs && !logprobs) throw new RequestError("top_logprobs needs logprobs: true", "top_logprobs");
  return {
    prompt: {
      kind: "chat",
      messages,
      continueLast,
      ...(calling && { calling }),
      ...(variables && { variables }),
    },
    options: { ...rest, max_tokens: max_completion_tokens ?? rest.max_tokens ?? null },
    logprobs: logprobs ? (top_logprobs ?? 0) : null,
    ...(grammar && { grammar }),
  };
}

/** Parses a completion request. Throws RequestError naming the first wrong parameter. */
export function prepareText(request: CompletionRequest, model: string): Prepared {
  check(request, PLAIN, model);
  const { prompt, logprobs, response_format, echo, best_of, ...options } = request;
  if (prompt == null) throw new RequestError("prompt is missing: give a string", "prompt");
  if (best_of != null && best_of !== (options.n ?? 1))
    throw new RequestError(`best_of must equal n, not be ${best_of}: answers are not ranked`, "best_of");
  if (echo && logprobs != null)
    throw new RequestError(
      "an artifact gives no logprobs of the prompt, which echo with logprobs asks for: leave one of them out",
      "echo",
      { code: "unsupported" },
    );
  const grammar = response_format == null ? null : grammarOf(response_format);
  const alone = echo && options.max_tokens === 0;
  return {
    prompt: {
      kind: "text",
      // The list is copied, as in `cloneable`.
      text: typeof prompt === "string" ? prompt : [...prompt],
      ...(echo && { echo: alone ? "alone" : "before" }),
    },
    options: alone ? { ...options, max_tokens: null } : options,
    logprobs: logprobs ?? null,
    ...(grammar && { grammar }),
  };
}

/** Rejects unknown names, wrong types, and a model other than the loaded one. */
export function check(request: object, known: Readonly<Record<string, ValueKind>>, model: string): void {
  checkKinds(request, known, "a request", (name, value) => refuse(name, value, Object.keys(known)));
  if (!isRecord(request)) return;
  if (request.model != null && request.model !== model)
    throw new RequestError(
      `model ${shown(request.model)} is not loaded here, but "${model}" is. Leave model out.`,
      "model",
    );
}

/** Throws RequestError for the first value of the wrong kind; `other` is called for names that are not known. */
export function checkKinds(
  given: object,
  known: Readonly<Record<string, ValueKind>>,
  what: string,
  other: (name: string, value: unknown) => void,
): void {
  if (!isRecord(given)) throw new RequestError(`${what} must be an object, not ${shown(given)}`);
  for (const [name, value] of Object.entries(given)) {
    const kind = Object.hasOwn(known, name) ? known[name] : undefined;
    if (!kind) other(name, value);
    else if (value != null && !kind[1](value))
      throw new RequestError(`${name} must be ${kind[0]}, not ${shown(value)}`, name);
  }
}

function refuse(name: string, value: unknown, known: readonly string[]): void {
  if (value === undefined) return;
  const neutral = Object.hasOwn(LACKING, name) ? LACKING[name] : undefined;
  if (!neutral) throw new RequestError(`unknown parameter ${name}${meant(name, known)}`, name);
  if (value === null || neutral.includes(shown(value))) return;
  throw new RequestError(
    `${name} is not supported by this engine, which only writes text. Leave it out, or ask a server that ` +
      "has it (HybridClient of nearfar/routing does where it has a cloud).",
    name,
    { code: "unsupported" },
  );
}

/** The prompt of a decision: messages, a text or token ids. */
export function promptOf(
  prompt: DecisionPrompt,
  variables: DecisionOptions["chat_template_kwargs"],
  model: string,
): Prompt {
  if (!Array.isArray(prompt) || typeof prompt[0] === "number")
    return prepareText({ prompt: prompt as string | readonly number[] }, model).prompt;
  const messages = prompt as readonly MessageParam[];
  return prepareChat({ messages, ...(variables && { chat_template_kwargs: variables }) }, model).prompt;
}
