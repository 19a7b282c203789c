/**
 * Checks the form of items, tools and options. The values of messages, tools and sampling parameters are
 * checked where the chat completion is. edge_runtime/openai/responses/checks.py does the same.
 */

import { RequestError } from "../protocol/errors.js";
import type { Wanted } from "./types.js";

type Json = Readonly<Record<string, unknown>>;

const NAMES = (
  "input stream model instructions previous_response_id store max_output_tokens temperature top_p top_k min_p " +
  "repetition_penalty presence_penalty frequency_penalty seed stop tools tool_choice parallel_tool_calls text " +
  "reasoning top_logprobs include chat_template_kwargs context_policy truncation background metadata " +
  "service_tier prompt_cache_key prompt_cache_retention safety_identifier user max_tool_calls signal"
).split(" ");

/** Fields that an item of a type must have. */
const NEEDED: Readonly<Record<string, readonly string[]>> = {
  message: ["role", "content"],
  function_call: ["call_id", "name", "arguments"],
  function_call_output: ["call_id", "output"],
  reasoning: [],
  item_reference: ["id"],
};
const FORMATS = ["text", "json_object", "json_schema"];

/** A request without nulls. Throws RequestError for a wrong form. */
export function checked(request: object): Wanted {
  const body: Record<string, unknown> = isObject(request) ? given(request) : {};
  const unknown = Object.keys(body).find((name) => !NAMES.includes(name));
  check(unknown === undefined, unknown ?? "", `unknown parameter ${unknown}`);
  check((body.background ?? false) === false, "background", "background may only be false here");
  check(
    (body.truncation ?? "disabled") === "disabled",
    "truncation",
    'truncation may only be "disabled" here',
  );
  for (const name of ["instructions", "previous_response_id"])
    check(typeof (body[name] ?? "") === "string", name, `${name} must be a string`);
  const most = body.max_output_tokens ?? 1;
  const counts = Number.isInteger(most) && Number(most) >= 1;
  check(counts, "max_output_tokens", "max_output_tokens must be a whole number, at least 1");
  check(typeof (body.store ?? true) === "boolean", "store", "store must be true or false");
  for (const name of ["text", "reasoning", "metadata"])
    check(isObject(body[name] ?? {}), name, `${name} must be an object`);
  body.text &&= options("text", body.text, ["format", "verbosity"], "verbosity");
  body.reasoning &&= options(
    "reasoning",
    body.reasoning,
    ["effort", "summary", "generate_summary"],
    "effort",
  );
  const format = (body.text as Json | undefined)?.format ?? { type: "text" };
  check(
    isObject(format) && FORMATS.includes(String(format.type)),
    "text",
    `text.format must be one of ${FORMATS}`,
  );
  const include = body.include ?? [];
  check(
    isListOf(include, (name) => typeof name === "string"),
    "include",
    "include must be a list of names",
  );
  if ("input" in body && typeof body.input !== "string") {
    check(Array.isArray(body.input), "input", "input must be a text or a list of items");
    body.input = (body.input as unknown[]).map(item);
  }
  if ("tools" in body) {
    check(Array.isArray(body.tools), "tools", "tools must be a list of functions and namespaces");
    body.tools = (body.tools as unknown[]).map((tool, at) => checkedTool(tool, `tools[${at}]`, true));
  }
  checkChoice(body.tool_choice ?? "auto");
  return body as Wanted;
}

function options(name: string, value: unknown, known: readonly string[], word: string): Json {
  const made = given(value as Json);
  const unknown = Object.keys(made).find((key) => !known.includes(key));
  check(unknown === undefined, name, `${name}.${unknown} is not a known field`);
  check(typeof (made[word] ?? "") === "string", name, `${name}.${word} must be a word`);
  return made;
}

function item(value: unknown, at: number): Json {
  const where = `input[${at}]`;
  check(isObject(value), "input", `${where} must be an item`);
  const sent = given(value as Json);
  // OpenAI's clients may leave out the type of a reference.
  const usual = Object.keys(sent).join() === "id" ? "item_reference" : "message";
  const made: Record<string, unknown> = { type: usual, ...sent };
  const kind = String(made.type);
  check(Object.hasOwn(NEEDED, kind), "input", `${where} must be one of ${Object.keys(NEEDED)}, not ${kind}`);
  for (const name of NEEDED[kind] ?? []) check(name in made, "input", `${where} must have ${name}`);
  for (const name of ["role", "call_id", "name", "arguments", "namespace", "id"])
    check(typeof (made[name] ?? "") === "string", "input", `${where}.${name} must be a text`);
  for (const name of ["content", "output", "summary"]) {
    const parts = made[name] ?? [];
    const fits = (kind !== "reasoning" && typeof parts === "string") || isListOf(parts, isPart);
    check(fits, "input", `${where}.${name} must be a text or parts with a type`);
  }
  return made;
}

function checkedTool(value: unknown, where: string, mayHold: boolean): Json {
  const made = isObject(value) ? given(value) : {};
  const isNamespace = mayHold && made.type === "namespace";
  const fits = (isNamespace || made.type === "function") && typeof made.name === "string";
  check(fits, "tools", `${where} must be a function${mayHold ? " or a namespace" : ""} with a name`);
  const known = ["type", "name", "description", ...(isNamespace ? ["tools"] : ["parameters", "strict"])];
  const unknown = Object.keys(made).find((name) => !known.includes(name));
  check(unknown === undefined, "tools", `${where}.${unknown} is not a known field`);
  if (!isNamespace) return made;
  check(Array.isArray(made.tools), "tools", `${where}.tools must be a list of functions`);
  const inner = made.tools as unknown[];
  return { ...made, tools: inner.map((tool, at) => checkedTool(tool, `${where}.tools[${at}]`, false)) };
}

function checkChoice(choice: unknown): void {
  // The chat completion checks a word.
  if (typeof choice === "string") return;
  const { type, name, mode, tools }: Json = isObject(choice) ? choice : {};
  const isNamed = (one: unknown): boolean => isObject(one) && typeof one.name === "string";
  const allows = type === "allowed_tools" && ["auto", "required"].includes(String(mode));
  const fits = allows ? isListOf(tools, isNamed) : type === "function" && typeof name === "string";
  check(fits, "tool_choice", "tool_choice must be a word, a function with its name, or allowed_tools");
}

function isPart(part: unknown): boolean {
  return isObject(part) && typeof part.type === "string" && typeof (part.text ?? "") === "string";
}

function isListOf(value: unknown, fits: (one: unknown) => boolean): boolean {
  return Array.isArray(value) && value.every(fits);
}

function isObject(value: unknown): value is Json {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** The fields that have a value: null and undefined stand for what is not given. */
function given(value: Json): Record<string, unknown> {
  return Object.fromEntries(Object.entries(value).filter(([, one]) => one != null));
}

function check(fits: boolean, param: string, message: string): void {
  if (!fits) throw new RequestError(message, param);
}
