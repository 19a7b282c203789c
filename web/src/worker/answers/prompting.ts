/** Prepares tools and calls for a chat template (tests/vectors/tools holds examples). */

import type { ChatMessage, FunctionTool } from "../../protocol/openai.js";
import { Exact, type ExactValue, writeExact } from "../text/jinja/exact.js";
import type { Told } from "../text/types.js";
import { argumentsOf } from "./arguments.js";
import { type CallFormat, readCalls, type Spelling } from "./format.js";
import { written } from "./values.js";

export interface Prompting {
  readonly messages: readonly Told[];
  readonly tools: readonly FunctionTool[];
}

/** The format in which earlier calls are written for a model whose own format has no calls. */
const BY_DEFAULT = readCalls({ begin: "<tool_call>", end: "</tool_call>" }, "");

/** Whether a chat template writes the tools into the prompt itself. */
export function knowsTools(template: string): boolean {
  return template.includes("tools");
}

/** The messages and tools that a template receives for a conversation with tools. */
export function prompting(
  messages: readonly ChatMessage[],
  tools: readonly FunctionTool[],
  form: CallFormat | null,
  template: string,
): Prompting {
  if (knowsTools(template)) return { messages: messages.map(withParsedArguments), tools };
  const calls = form ?? BY_DEFAULT;
  const plain = messages.map((message) => inWords(message, calls));
  return { messages: tools.length > 0 ? described(plain, tools, calls) : plain, tools: [] };
}

function withParsedArguments(message: ChatMessage): Told {
  const { tool_calls, ...rest } = message;
  if (!tool_calls?.length) return { ...rest };
  const calls = tool_calls.map((call) => {
    const { name, arguments: text } = call.function;
    return { ...call, function: { name, arguments: new Exact(argumentsOf(text)) } };
  });
  return { ...rest, tool_calls: calls };
}

/** Describes the tools in words in the system message, for a chat template that does not write tools. */
function described(messages: readonly Told[], tools: readonly FunctionTool[], form: CallFormat): Told[] {
  const example = writtenCall(form, "<name>", new Map([["<argument>", "<value>"]]));
  const text =
    `You can call these functions:\n${tools.map((tool) => written(tool.function)).join("\n")}\n` +
    `To call one, write ${example} and nothing else.`;
  const [first, ...rest] = messages;
  if (first?.role === "system") return [{ ...first, content: `${first.content}\n\n${text}` }, ...rest];
  return [{ role: "system", content: text }, ...messages];
}

/** Rewrites a message without roles and fields for tools, for a chat template that would omit them. */
function inWords(message: ChatMessage, form: CallFormat): Told {
  if (message.role === "tool") return { role: "user", content: `Result: ${message.content}` };
  if (!message.tool_calls?.length) return { ...message };
  const calls = message.tool_calls.map(({ function: { name, arguments: text } }) =>
    writtenCall(form, name, argumentsOf(text)),
  );
  return { role: message.role, content: [message.content, ...calls].join("\n").trim() };
}

/** A call in the model's own format, without blank lines. */
function writtenCall(form: CallFormat, name: string, given: ExactValue): string {
  const { named, spelling } = form;
  const inner = named
    ? named.before + name + named.after + spelled(spelling, given)
    : writeExact(
        new Map<string, ExactValue>([
          [form.name, name],
          [form.arguments, given],
        ]),
      );
  const [begin, end] = form.bare ? ["", ""] : [form.begin, form.end];
  return begin + (form.listed ? `[${inner}]` : inner) + end;
}

function spelled(spelling: Spelling | null, given: ExactValue): string {
  if (!spelling || !(given instanceof Map)) return writeExact(given);
  const { before_name, after_name, after_value, raw } = spelling;
  const each = [...given].map(([name, value]) => {
    const text = raw && typeof value === "string" ? value : spelledValue(spelling, value);
    return before_name + name + after_name + text + after_value;
  });
  return spelling.begin + each.join(spelling.separator) + spelling.end;
}

function spelledValue(spelling: Spelling, value: ExactValue): string {
  const [yes = "", no = "", nothing = ""] = spelling.words;
  if (value === null) return nothing;
  if (typeof value === "boolean") return value ? yes : no;
  const [open, close] = spelling.quotes;
  if (!open || !close) return writeExact(value);
  if (typeof value === "string") return open + value + close;
  if (Array.isArray(value)) return `[${value.map((one) => spelledValue(spelling, one)).join(",")}]`;
  if (!(value instanceof Map)) return writeExact(value);
  return `{${[...value].map(([name, one]) => `${name}:${spelledValue(spelling, one)}`).join(",")}}`;
}
