import type { ToolCall, ToolCallDelta } from "./openai.js";

/** Adds a streamed part of a call to the calls so far. */
export function addCall(calls: ToolCall[], { index, id, function: called }: ToolCallDelta): void {
  calls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } };
  const call = calls[index];
  if (id) call.id = id;
  call.function.name += called?.name ?? "";
  call.function.arguments += called?.arguments ?? "";
}
