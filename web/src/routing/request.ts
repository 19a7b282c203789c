/** Reads from OpenAI's parameters what the decision needs, as Python does (routing/request.py). */

import { meant, RequestError } from "../protocol/errors.js";
import { type HybridRequest, type Message, textOf } from "./openai.js";
import { type Feature, MODES, type Mode } from "./types.js";

/** A request's hints for its own routing. */
export interface Hints {
  readonly mode: Mode | null;
  readonly private: boolean;
  readonly conversation: string | null;
  readonly expected_tokens: number | null;
}

/** A request without its hints, as the sides may see it, and the hints. */
export interface Asked {
  readonly request: HybridRequest;
  readonly hints: Hints;
}

type Fields = Readonly<Record<string, unknown>>;

const CHECKS: Readonly<Record<keyof Hints, readonly [(value: unknown) => boolean, string]>> = {
  mode: [(value) => MODES.some((mode) => mode === value), `one of ${MODES.join(", ")}`],
  private: [(value) => typeof value === "boolean", "true or false"],
  conversation: [(value) => typeof value === "string", "a string"],
  expected_tokens: [(value) => Number.isInteger(value) && Number(value) > 0, "a whole number from 1"],
};

/**
 * Reads a request's routing hints: `x_nearfar` at the top, in `extra_body`, and (private only) in a message.
 * The fields of `extra_body` become fields of the request. RequestError for similar names in other places,
 * for unsupported parameters, and for unknown hints: a misspelt `private` must not pass.
 */
export function hintsOf(asked: HybridRequest): Asked {
  const { extra_body, x_nearfar, ...rest } = asked;
  const extra = extra_body ?? {};
  if (!isFields(extra))
    throw new RequestError(`extra_body must be an object, not ${typeof extra}`, "extra_body");
  const twice = ["messages", "stream", "signal", "extra_body"].filter((name) => name in extra);
  if (twice.length > 0)
    throw new RequestError(
      `extra_body must not have ${twice.join(", ")}: give it as a parameter, not in extra_body`,
      "extra_body",
    );
  const { x_nearfar: inner, ...fields } = extra;
  const request: HybridRequest = { ...rest, ...fields };
  noStrangers(request, "the request");
  const messages: unknown = asked.messages;
  if (!Array.isArray(messages) || messages.length === 0 || !messages.every(isFields))
    throw new RequestError("messages must be a list of at least one { role, content }", "messages");
  const said = [parsed(x_nearfar), parsed(inner)];
  const plain = messages.map((message: Fields): Message => {
    noStrangers(message, "a message");
    const { x_nearfar: own, ...words } = message;
    const hints = parsed(own);
    if (Object.entries(hints).some(([name, value]) => name !== "private" && value !== null))
      throw new RequestError("the x_nearfar of a message says private and nothing else", "messages");
    said.push(hints);
    return words as unknown as Message;
  });
  return { request: checked({ ...request, messages: plain }), hints: together(said) };
}

function parsed(data: unknown): Hints {
  if (data !== null && data !== undefined && !isFields(data))
    throw new RequestError(`x_nearfar must be an object with ${Object.keys(CHECKS).join(", ")}`, "x_nearfar");
  const given = Object.entries(data ?? {}).filter(([, value]) => value !== null && value !== undefined);
  const [unknown] = given.map(([name]) => name).filter((name) => !Object.hasOwn(CHECKS, name));
  if (unknown !== undefined)
    throw new RequestError(
      `x_nearfar has no field ${unknown}${meant(unknown, Object.keys(CHECKS))}`,
      "x_nearfar",
    );
  for (const [name, value] of given) {
    const [right, words] = CHECKS[name as keyof Hints];
    if (!right(value))
      throw new RequestError(`x_nearfar.${name} must be ${words}, not ${JSON.stringify(value)}`, "x_nearfar");
  }
  return {
    mode: null,
    private: false,
    conversation: null,
    expected_tokens: null,
    ...Object.fromEntries(given),
  };
}

function noStrangers(given: object, where: string): void {
  for (const name of Object.keys(given))
    if (name === "private" || name === "hints" || (name.startsWith("x_") && name !== "x_nearfar"))
      throw new RequestError(
        `${where} has no field ${name}; what it says of its routing goes into x_nearfar`,
        name,
      );
}

/** Merges the hints; the request is private if any of them says so. */
function together(said: readonly Hints[]): Hints {
  const one = <Name extends keyof Hints>(name: Name): Hints[Name] | null => {
    const values = new Set(said.map((hints) => hints[name]).filter((value) => value !== null));
    if (values.size > 1)
      throw new RequestError(`x_nearfar.${name} is given twice with different values`, "x_nearfar");
    const [value = null] = values;
    return value;
  };
  return {
    mode: one("mode"),
    private: said.some((hints) => hints.private),
    conversation: one("conversation"),
    expected_tokens: one("expected_tokens"),
  };
}

function checked(request: HybridRequest): HybridRequest {
  const { n, max_tokens, max_completion_tokens } = request as HybridRequest & { n?: number | null };
  if ((n ?? 1) !== 1)
    throw new RequestError("n: the hybrid client gives one answer per request; send several requests", "n");
  if (request.continue_final_message)
    throw new RequestError(
      "continue_final_message is the hybrid client's own means; ask a side directly",
      "continue_final_message",
    );
  for (const [name, value] of Object.entries({ max_completion_tokens, max_tokens }))
    if (value != null && !(Number.isInteger(value) && value > 0))
      throw new RequestError(`${name} must be a whole number from 1, not ${JSON.stringify(value)}`, name);
  return request;
}

function isFields(value: unknown): value is Fields {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** The features that a side needs for the request. */
export function featuresOf(request: HybridRequest): Feature[] {
  const features: Feature[] = [];
  if (request.tools?.length && request.tool_choice !== "none") features.push("tools");
  const format = request.response_format?.type;
  if (format === "json_schema" || format === "json_object") features.push(format);
  else if (format === "grammar" || format === "regex") features.push("grammar");
  if (
    request.messages.some(
      ({ content }) => Array.isArray(content) && content.some(({ type }) => type !== "text"),
    )
  )
    features.push("images");
  if (request.logprobs) features.push("logprobs");
  if (request.reasoning_effort) features.push("reasoning");
  return features;
}

/** Whether the text of an answer is all that another side must know to continue it. */
export function isPlain(request: HybridRequest): boolean {
  return !request.tools?.length && (request.response_format?.type ?? "text") === "text";
}

/**
 * Estimates the tokens of messages before a model counts them: four letters each, and each message's frame.
 */
export function estimateTokens(messages: readonly Message[]): number {
  return messages.reduce((sum, message) => sum + Math.ceil(textOf(message).length / 4) + 4, 0);
}
