/** The tools of a chat request, checked. */

import { MAX_TOOLS, MAX_TOOLS_BYTES } from "../format/constants.js";
import { RequestError } from "../protocol/errors.js";
import type { Calling } from "../protocol/messages.js";
import type { ChatCompletionRequest, FunctionTool } from "../protocol/openai.js";
import { mayBeObject } from "../protocol/parameters.js";
import { bytesOf, counted, isRecord, shown } from "./values.js";

const NAME = /^[a-zA-Z0-9_.-]{1,64}$/;

type Names = "tools" | "tool_choice" | "parallel_tool_calls";
type Asked = { readonly [Name in Names]: ChatCompletionRequest[Name] | undefined };

/** The tools that may be called, copies that can be sent; null where there are none. */
export function checkedCalling({ tools, tool_choice, parallel_tool_calls }: Asked): Calling | null {
  const listed = checkedTools(tools ?? []);
  const choice = tool_choice ?? "auto";
  const called = typeof choice === "string" ? null : namedBy(choice);
  if (listed.length === 0) {
    if (choice === "none" || choice === "auto") return null;
    throw new RequestError("tool_choice asks for a call, but there are no tools", "tool_choice");
  }
  if (choice === "none") return null;
  const offered = called === null ? listed : listed.filter((tool) => tool.function.name === called);
  if (offered.length === 0)
    throw new RequestError(`tool_choice names '${called}', which is not among the tools`, "tool_choice");
  return {
    tools: offered,
    required: choice !== "auto",
    parallel: called === null && (parallel_tool_calls ?? true),
  };
}

function namedBy(choice: unknown): string {
  const { type, function: named, ...rest } = isRecord(choice) ? choice : {};
  const { name, ...more } = isRecord(named) ? named : {};
  if (type === "function" && typeof name === "string" && Object.keys({ ...rest, ...more }).length === 0)
    return name;
  throw new RequestError(
    `tool_choice must be { type: "function", function: { name } }, not ${shown(choice)}`,
    "tool_choice",
  );
}

function checkedTools(tools: readonly unknown[]): FunctionTool[] {
  if (tools.length > MAX_TOOLS) throw wrong("", `takes at most ${MAX_TOOLS} tools, not ${tools.length}`);
  tools.forEach(checkTool);
  const text = written(tools);
  const bytes = bytesOf(text);
  if (bytes > MAX_TOOLS_BYTES)
    throw wrong("", `takes at most ${counted(MAX_TOOLS_BYTES)} bytes of JSON, not ${counted(bytes)}`);
  const copies = JSON.parse(text) as FunctionTool[];
  const names = copies.map((tool) => tool.function.name);
  const twice = names.find((name, at) => names.indexOf(name) < at);
  if (twice !== undefined) throw wrong("", `has two of the name ${shown(twice)}: give each its own`);
  return copies;
}

function checkTool(tool: unknown, at: number): void {
  const { type, function: given, ...rest } = isRecord(tool) ? tool : {};
  if (type !== "function" || !isRecord(given))
    throw wrong(`[${at}]`, `must be { type: "function", function }, not ${shown(tool)}`);
  const { name, description, parameters, strict, ...more } = given;
  const [other] = Object.keys({ ...rest, ...more });
  if (other !== undefined) throw wrong(`[${at}]`, `has an unknown field ${other}`);
  const where = `[${at}].function`;
  if (typeof name !== "string" || !NAME.test(name))
    throw wrong(`${where}.name`, `must be 1 to 64 letters, digits, _, . and -, not ${shown(name)}`);
  if (description != null && typeof description !== "string")
    throw wrong(`${where}.description`, `must be a string, not ${shown(description)}`);
  if (parameters != null && !(isRecord(parameters) && mayBeObject(parameters, parameters)))
    throw wrong(`${where}.parameters`, `must be a schema of type object, not ${shown(parameters)}`);
  if (strict != null && typeof strict !== "boolean")
    throw wrong(`${where}.strict`, `must be true or false, not ${shown(strict)}`);
}

function written(tools: readonly unknown[]): string {
  try {
    return JSON.stringify(tools);
  } catch (cause) {
    throw new RequestError("tools must be JSON", "tools", { cause });
  }
}

function wrong(where: string, what: string): RequestError {
  return new RequestError(`tools${where} ${what}`, "tools");
}
