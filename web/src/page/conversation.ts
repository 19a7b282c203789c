/** The messages of a chat, checked: with their content as one string, and nothing left out. */

import { ROLES } from "../format/constants.js";
import { type ErrorCode, RequestError } from "../protocol/errors.js";
import type { ChatMessage, MessageParam, ToolCall } from "../protocol/openai.js";
import { isEmpty, isRecord, shown } from "./values.js";

const COMMON = ["role", "content", "name"];
/** Additional fields of messages of these roles. */
const MORE: Readonly<Record<string, readonly string[]>> = {
  assistant: ["tool_calls", "reasoning_content", "reasoning", "refusal"],
  tool: ["tool_call_id"],
};

type Wrong = (what: string, code?: ErrorCode) => never;

export function checkedMessages(messages: readonly MessageParam[]): ChatMessage[] {
  const list: unknown = messages;
  if (!Array.isArray(list) || list.length === 0)
    throw new RequestError("messages must be a list of at least one { role, content }", "messages");
  return list.map((message: unknown, at) => checkedMessage(message, `messages[${at}]`));
}

function checkedMessage(message: unknown, where: string): ChatMessage {
  const wrong: Wrong = (what, code = "invalid-request") => {
    throw new RequestError(`${where}${what}`, "messages", { code });
  };
  if (!isRecord(message)) return wrong(` must be an object { role, content }, not ${shown(message)}`);
  const { role, name, tool_calls, tool_call_id, refusal } = message;
  const reasoning = message.reasoning_content ?? message.reasoning;
  if (typeof role !== "string" || role === "")
    return wrong(`.role must be one of ${ROLES.join(", ")}, not ${shown(role)}`);
  if (name != null && typeof name !== "string") return wrong(`.name must be a string, not ${shown(name)}`);
  const known = [...COMMON, ...((Object.hasOwn(MORE, role) && MORE[role]) || [])];
  for (const [field, value] of Object.entries(message))
    if (!known.includes(field) && !isEmpty(value))
      wrong(`.${field} is not supported by this engine in a message of role ${role}`, "unsupported");
  if (role === "tool" && typeof tool_call_id !== "string")
    return wrong(`.tool_call_id must be the id of the call that it answers, not ${shown(tool_call_id)}`);
  if (reasoning != null && typeof reasoning !== "string")
    return wrong(`.reasoning_content must be a string, not ${shown(reasoning)}`);
  if (refusal != null && typeof refusal !== "string")
    return wrong(`.refusal must be a string, not ${shown(refusal)}`);
  const calls = checkedCalls(tool_calls ?? [], wrong);
  return {
    // The type has the usual roles; other roles are for templates that name them
    // (worker/answers/prompting.ts).
    role: (role === "developer" ? "system" : role) as ChatMessage["role"],
    content: contentOf(message, wrong) || refusal || "",
    ...(name != null && { name }),
    ...(calls.length > 0 && { tool_calls: calls }),
    ...(typeof tool_call_id === "string" && { tool_call_id }),
    ...(reasoning != null && { reasoning_content: reasoning }),
  };
}

function contentOf({ role, content }: Record<string, unknown>, wrong: Wrong): string {
  if (content == null && role === "assistant") return "";
  const text = Array.isArray(content)
    ? content.map((part: unknown, at) => textOf(part, at, role, wrong)).join("")
    : content;
  return typeof text === "string" ? text : wrong(`.content must be text, not ${shown(content)}`);
}

function textOf(part: unknown, at: number, role: unknown, wrong: Wrong): string {
  const { type, text, refusal } = isRecord(part) ? part : {};
  if (type === "text" && typeof text === "string") return text;
  if (type === "refusal" && typeof refusal === "string" && role === "assistant") return refusal;
  const isOther = typeof type === "string" && type !== "text";
  const given = isOther ? `a part of type ${type}` : shown(part);
  return wrong(
    `.content[${at}] must be { type: "text", text }, not ${given}: this engine reads text only`,
    isOther ? "unsupported" : "invalid-request",
  );
}

/** Checks the calls of an earlier answer; the numbers that streams give them are ignored. */
function checkedCalls(calls: unknown, wrong: Wrong): ToolCall[] {
  if (!Array.isArray(calls)) return wrong(`.tool_calls must be a list, not ${shown(calls)}`);
  return calls.map((call: unknown, at): ToolCall => {
    const where = `.tool_calls[${at}]`;
    const { id, type = "function", function: called, index: _index, ...rest } = isRecord(call) ? call : {};
    const { name, arguments: given, ...more } = isRecord(called) ? called : {};
    if (typeof id !== "string" || type !== "function" || typeof name !== "string")
      return wrong(`${where} must be { id, type: "function", function }, not ${shown(call)}`);
    const [other] = Object.keys({ ...rest, ...more });
    if (other !== undefined) return wrong(`${where} has an unknown field ${other}`);
    if (typeof given !== "string")
      return wrong(`${where}.function.arguments must be JSON as text, not ${shown(given)}`);
    return { id, type, function: { name, arguments: given } };
  });
}
