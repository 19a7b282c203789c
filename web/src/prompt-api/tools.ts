import type { ChatCompletionRequest, ChatMessage, ToolCall } from "../protocol/openai.js";
import type { LanguageModelTool } from "./types.js";

/** Answers of one prompt that call tools, before it fails: a model may go round in circles. */
export const MOST_ROUNDS = 16;

/** The fields of a request that say which tools there are; none where there are none. */
export function toolsAsked(tools: readonly LanguageModelTool[]): Pick<ChatCompletionRequest, "tools"> {
  if (tools.length === 0) return {};
  return {
    tools: tools.map(({ name, description, inputSchema }) => {
      return { type: "function", function: { name, description, parameters: inputSchema } };
    }),
  };
}

/** The results of all calls, which run at once; rejects with what a tool throws. */
export function called(
  tools: readonly LanguageModelTool[],
  calls: readonly ToolCall[],
): Promise<ChatMessage[]> {
  const results = calls.map(async ({ id, function: { name, arguments: given } }): Promise<ChatMessage> => {
    const tool = tools.find((one) => one.name === name);
    if (!tool) throw new DOMException(`The model called ${name}, which is not there.`, "OperationError");
    const result: unknown = await tool.execute(JSON.parse(given || "{}"));
    const content = typeof result === "string" ? result : (JSON.stringify(result) ?? "");
    return { role: "tool", tool_call_id: id, name, content };
  });
  return Promise.all(results);
}
