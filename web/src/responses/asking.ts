/**
 * A request of OpenAI's Responses API as a chat completion. Items become messages: a model's reasoning and
 * calls become part of the message of their answer. Tools of a namespace become functions whose name joins
 * both names. edge_runtime/openai/responses/asking.py does the same.
 */

import { RequestError } from "../protocol/errors.js";
import type { ChatCompletionRequest, MessageParam, TextPart, ToolCall } from "../protocol/openai.js";
import type { ResponsePart, ResponseTool, Wanted } from "./types.js";

const TEXTS = ["input_text", "output_text", "text", "summary_text", "reasoning_text"];

/** Fields with the same name in a chat completion. */
const SHARED = [
  "temperature",
  "top_p",
  "top_k",
  "min_p",
  "repetition_penalty",
  "presence_penalty",
  "frequency_penalty",
  "seed",
  "stop",
  "stream",
  "parallel_tool_calls",
  "chat_template_kwargs",
] as const;

type Message = { -readonly [Name in keyof MessageParam]: MessageParam[Name] } & { tool_calls?: ToolCall[] };
/** The chat completion, with fields that a template may follow. */
export type Chat = ChatCompletionRequest & { reasoning_effort?: string; verbosity?: string };

/** The chat completion of a checked request. `before`: the messages of the responses that it continues. */
export function chatOf(body: Wanted, before: readonly MessageParam[]): Chat {
  const { instructions, input, max_output_tokens, top_logprobs, include = [], text, reasoning } = body;
  const system: MessageParam[] =
    instructions === undefined ? [] : [{ role: "system", content: instructions }];
  const { tools, choice } = toolsOf(body);
  const ranked = top_logprobs !== undefined || include.includes("message.output_text.logprobs");
  const fields = {
    ...Object.fromEntries(SHARED.map((name) => [name, body[name]])),
    messages: withOneSystem([...system, ...before, ...messagesOf(input)]),
    max_completion_tokens: max_output_tokens,
    tools: tools.length ? tools : undefined,
    tool_choice: choice,
    response_format: formatOf(text?.format),
    verbosity: text?.verbosity,
    reasoning_effort: reasoning?.effort,
    logprobs: ranked || undefined,
    top_logprobs,
  };
  return present(fields) as unknown as Chat;
}

/** Items as messages of a chat. */
export function messagesOf(given: Wanted["input"]): MessageParam[] {
  if (given === undefined || typeof given === "string")
    return given ? [{ role: "user", content: given }] : [];
  const made: Message[] = [];
  let thoughts = "";
  for (const item of given) {
    if (item.type === "reasoning") {
      const parts = item.content?.length ? item.content : (item.summary ?? []);
      thoughts += parts.map(({ text }) => text ?? "").join("");
      continue;
    }
    if (item.type === "function_call_output") {
      made.push({ role: "tool", tool_call_id: item.call_id, content: contentOf(item.output) });
      continue;
    }
    if (item.type === "function_call") {
      const called = { name: joined(item.namespace, item.name), arguments: item.arguments };
      const last = made.at(-1);
      const own = last?.role === "assistant" && thoughts === "" ? last : undefined;
      const message: Message = own ?? { role: "assistant", content: null };
      if (!own) made.push(message);
      message.tool_calls = [
        ...(message.tool_calls ?? []),
        { id: item.call_id, type: "function", function: called },
      ];
    } else if (item.type === "message") made.push({ role: item.role, content: contentOf(item.content) });
    const last = made.at(-1);
    if (thoughts && last?.role === "assistant") last.reasoning_content = thoughts;
    thoughts = "";
  }
  return made;
}

/** The namespace and the name of each function, by the joined name that the model sees. */
export function functionsOf(
  tools: readonly ResponseTool[],
): Map<string, readonly [string | undefined, string]> {
  const found = new Map<string, readonly [string | undefined, string]>();
  for (const tool of tools)
    if (tool.type === "function") found.set(tool.name, [undefined, tool.name]);
    else for (const { name } of tool.tools) found.set(joined(tool.name, name), [tool.name, name]);
  return found;
}

/** The fields that have a value. */
export function present<T extends object>(fields: T): T {
  return Object.fromEntries(Object.entries(fields).filter(([, value]) => value != null)) as T;
}

function joined(namespace: string | undefined, name: string): string {
  if (!namespace) return name;
  return namespace.endsWith("__") ? namespace + name : `${namespace}__${name}`;
}

/** Merges the first instructions: chat templates take one system message, at the start. */
function withOneSystem(messages: readonly MessageParam[]): readonly MessageParam[] {
  const spoken = messages.findIndex(({ role }) => role !== "system" && role !== "developer");
  const first = messages.slice(0, spoken < 0 ? messages.length : spoken);
  if (first.length < 2 || first.some(({ content }) => typeof content !== "string")) return messages;
  const content = first.map((message) => message.content).join("\n\n");
  return [{ role: "system", content }, ...messages.slice(first.length)];
}

/** Parts as the content of a message: one string where there is text alone. */
function contentOf(given: string | readonly ResponsePart[]): NonNullable<MessageParam["content"]> {
  if (typeof given === "string") return given;
  const parts = given.map(partOf);
  const isText = parts.every((part) => part.type === "text" && "text" in part && part.text !== undefined);
  return isText
    ? parts.map((part) => ("text" in part ? part.text : "")).join("")
    : (parts as unknown as TextPart[]);
}

/** A part in a chat completion's form, whose own checks refuse other kinds. */
function partOf({ type, text, refusal, image_url }: ResponsePart): { type: string } & Partial<ResponsePart> {
  if (TEXTS.includes(type)) return { type: "text", ...(text !== undefined && { text }) };
  if (type === "refusal") return { type, ...(refusal !== undefined && { refusal }) };
  if (type === "input_image" && typeof image_url === "string")
    return { type: "image_url", image_url: { url: image_url } };
  return { type };
}

function formatOf(given: NonNullable<Wanted["text"]>["format"]): object | undefined {
  if (given?.type !== "json_schema") return given && present(given);
  const { schema, description, strict, name = "answer" } = given;
  return { type: "json_schema", json_schema: present({ name, schema, description, strict }) };
}

function toolsOf({ tools = [], tool_choice }: Wanted): {
  tools: { function: { name: string } }[];
  choice: unknown;
} {
  const made = tools.flatMap((tool) =>
    (tool.type === "function" ? [tool] : tool.tools).map(({ name, description, parameters, strict }) => {
      const own = joined(tool.type === "namespace" ? tool.name : undefined, name);
      return { type: "function", function: present({ name: own, description, parameters, strict }) };
    }),
  );
  // Chats accept "none" and "auto" without tools, and so do responses.
  if (tool_choice === undefined || typeof tool_choice === "string")
    return { tools: made, choice: made.length || tool_choice === "required" ? tool_choice : undefined };
  if (tool_choice.type === "function") {
    const name = joined(tool_choice.namespace, tool_choice.name);
    return { tools: made, choice: { type: "function", function: { name } } };
  }
  const names = tool_choice.tools.map((each) => joined(each.namespace, each.name));
  const strange = names.find((name) => !made.some((tool) => tool.function.name === name));
  if (strange !== undefined)
    throw new RequestError(`tool_choice allows "${strange}", which is not among the tools`, "tool_choice");
  return { tools: made.filter((tool) => names.includes(tool.function.name)), choice: tool_choice.mode };
}
