import type { ChatCompletionRequest, ChatMessage, ToolCall } from "../protocol/openai.js";
import type { LanguageModelTool } from "./types.js";

/**
 * The most answers with calls in one prompt; then the prompt fails, because a model may repeat itself for
 * ever.
 */
export const MOST_ROUNDS = 16;

/** The fields of a request that offer tools; no fields without tools. */
export function toolsAsked(tools: readonly LanguageModelTool[]): Pick<ChatCompletionRequest, "tools"> {
  if (tools.length === 0) return {};
  return {
    tools: tools.map(({ name, description, inputSchema }) => {
      return { type: "function", function: { name, description, parameters: inputSchema } };
    }),
  };
}

/** Runs all calls at once and returns their results; rejects with the error of a tool that throws. */
export function called(
  tools: readonly LanguageModelTool[],
  calls: readonly ToolCall[],
): Promise<ChatMessage[]> {
  const results = calls.map(async ({ id, function: { name, arguments: given } }): Promise<ChatMessage> => {
    const tool = tools.find((one) => one.name === name);
    if (!tool)
      throw new DOMException(`The model called ${name}, which is not among the tools.`, "OperationError");
    const result: unknown = await tool.execute(JSON.parse(given || "{}"));
    const content = typeof result === "string" ? result : (JSON.stringify(result) ?? "");
    return { role: "tool", tool_call_id: id, name, content };
  });
  return Promise.all(results);
}
