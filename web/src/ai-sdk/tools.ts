import type {
  LanguageModelV4CallOptions,
  LanguageModelV4ToolCallPart,
  LanguageModelV4ToolResultOutput,
  LanguageModelV4ToolResultPart,
  SharedV4Warning,
} from "@ai-sdk/provider";
import type { ChatCompletionRequest, MessageParam, ToolCall } from "../protocol/openai.js";

/** Converts tools and their results from the AI SDK's records to OpenAI's. */

type Refuse = (functionality: string) => Error;

/** The fields of a request that offer tools; no fields without tools. */
export function toolsOf(
  { tools = [], toolChoice }: LanguageModelV4CallOptions,
  warnings: SharedV4Warning[],
  refuse: Refuse,
): Pick<ChatCompletionRequest, "tools" | "tool_choice"> {
  if (tools.length === 0) return {};
  const listed = tools.map((tool) => {
    if (tool.type !== "function") throw refuse(`the tool ${tool.name} of a provider`);
    const { name, description, inputSchema, inputExamples, strict } = tool;
    if (inputExamples?.length)
      warnings.push({ type: "unsupported", feature: `inputExamples of ${name}`, details: "left out" });
    const spoken = {
      ...(description !== undefined && { description }),
      ...(strict !== undefined && { strict }),
    };
    return { type: "function", function: { name, ...spoken, parameters: inputSchema } } as const;
  });
  if (!toolChoice) return { tools: listed };
  if (toolChoice.type !== "tool") return { tools: listed, tool_choice: toolChoice.type };
  return { tools: listed, tool_choice: { type: "function", function: { name: toolChoice.toolName } } };
}

/** A call of an earlier answer. If its arguments never became complete JSON, it has no arguments. */
export function callOf(part: LanguageModelV4ToolCallPart): ToolCall {
  const input = typeof part.input === "string" ? parsed(part.input) : part.input;
  const isObject = typeof input === "object" && input !== null;
  const text = isObject ? JSON.stringify(input) : "{}";
  return { id: part.toolCallId, type: "function", function: { name: part.toolName, arguments: text } };
}

export function parsed(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

export function resultOf(
  { toolCallId, toolName, output }: LanguageModelV4ToolResultPart,
  refuse: Refuse,
): MessageParam {
  return { role: "tool", tool_call_id: toolCallId, name: toolName, content: textOf(output, refuse) };
}

function textOf(output: LanguageModelV4ToolResultOutput, refuse: Refuse): string {
  switch (output.type) {
    case "text":
    case "error-text":
      return output.value;
    case "json":
    case "error-json":
      return JSON.stringify(output.value);
    case "execution-denied":
      return output.reason ?? "The call was denied.";
    case "content":
      return output.value
        .map((part) => {
          if (part.type === "text") return part.text;
          throw refuse(`a tool's result with a part of type ${part.type}`);
        })
        .join("");
  }
}
