import {
  type LanguageModelV4CallOptions,
  type LanguageModelV4Message,
  type SharedV4Warning,
  UnsupportedFunctionalityError,
} from "@ai-sdk/provider";
import type { ChatCompletionRequest, MessageParam, ToolCall } from "../protocol/openai.js";
import { callOf, resultOf, toolsOf } from "./tools.js";

/** The engine request for an AI SDK call, plus warnings for ignored options. */
export interface PreparedCall {
  readonly request: ChatCompletionRequest;
  readonly warnings: SharedV4Warning[];
}

export function prepare(options: LanguageModelV4CallOptions, modelId: string): PreparedCall {
  const { reasoning = "provider-default", abortSignal } = options;
  const warnings: SharedV4Warning[] = [];
  if (!["provider-default", "none"].includes(reasoning))
    warnings.push({ type: "unsupported", feature: "reasoning", details: "the engine has no such setting" });
  const refuse = (functionality: string): Error => unsupported(functionality, modelId);
  const messages = options.prompt.flatMap((message) => messagesOf(message, refuse));
  const sampling = {
    max_tokens: options.maxOutputTokens,
    temperature: options.temperature,
    top_p: options.topP,
    top_k: options.topK,
    presence_penalty: options.presencePenalty,
    frequency_penalty: options.frequencyPenalty,
    seed: options.seed,
    stop: options.stopSequences?.length ? options.stopSequences : undefined,
    response_format: formatOf(options.responseFormat),
    signal: abortSignal,
  };
  const given = Object.entries(sampling).filter(([, value]) => value !== undefined);
  // The engine checks every name and value of `nearfar`.
  const request = {
    ...options.providerOptions?.nearfar,
    ...Object.fromEntries(given),
    ...toolsOf(options, warnings, refuse),
    messages,
  };
  return { request, warnings };
}

function messagesOf(
  message: LanguageModelV4Message,
  refuse: (functionality: string) => Error,
): MessageParam[] {
  if (message.role === "system") return [{ role: "system", content: message.content }];
  if (message.role === "tool")
    // Approvals are not sent, because they have had their effect: an approved call has a result, and a denied
    // call has a result that says so.
    return message.content.flatMap((part) => (part.type === "tool-result" ? [resultOf(part, refuse)] : []));
  let content = "";
  let reasoning = "";
  const calls: ToolCall[] = [];
  for (const part of message.content) {
    if (part.type === "text") content += part.text;
    else if (part.type === "reasoning") reasoning += part.text;
    else if (part.type === "tool-call" && !part.providerExecuted) calls.push(callOf(part));
    else throw refuse(partName(part));
  }
  return [
    {
      role: message.role,
      content,
      ...(reasoning !== "" && { reasoning_content: reasoning }),
      ...(calls.length > 0 && { tool_calls: calls }),
    },
  ];
}

function partName(part: { readonly type: string; readonly mediaType?: string }): string {
  return `a message's part of type ${part.type}${part.mediaType ? ` (${part.mediaType})` : ""}`;
}

/** Converts a response format to OpenAI's fields. */
function formatOf(format: LanguageModelV4CallOptions["responseFormat"]): object | undefined {
  if (format?.type !== "json") return undefined;
  const { schema, name = "response", description } = format;
  if (!schema) return { type: "json_object" };
  const json_schema = { name, schema, strict: true, ...(description !== undefined && { description }) };
  return { type: "json_schema", json_schema };
}

function unsupported(functionality: string, modelId: string): UnsupportedFunctionalityError {
  const message = `${functionality}: not supported by the model ${modelId}, which reads and writes text`;
  return new UnsupportedFunctionalityError({ functionality, message });
}
