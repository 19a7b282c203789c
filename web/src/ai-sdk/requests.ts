import {
  type LanguageModelV4CallOptions,
  type LanguageModelV4Message,
  type SharedV4Warning,
  UnsupportedFunctionalityError,
} from "@ai-sdk/provider";
import type { ChatCompletionRequest, MessageParam } from "../both/openai.js";

/** The AI SDK's call as the engine's request, with what of it has no meaning here. */
export interface PreparedCall {
  readonly request: ChatCompletionRequest;
  readonly warnings: SharedV4Warning[];
}

export function prepare(options: LanguageModelV4CallOptions, modelId: string): PreparedCall {
  refuseTools(options, modelId);
  const { reasoning = "provider-default", abortSignal } = options;
  const warnings: SharedV4Warning[] = [];
  if (!["provider-default", "none"].includes(reasoning))
    warnings.push({ type: "unsupported", feature: "reasoning", details: "the engine has no such setting" });
  const messages = options.prompt.map((message) => messageOf(message, modelId, warnings));
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
  // The engine checks every name and value of these.
  const request = { ...options.providerOptions?.nearfar, ...Object.fromEntries(given), messages };
  return { request, warnings };
}

function refuseTools({ tools = [], toolChoice }: LanguageModelV4CallOptions, modelId: string): void {
  const [first] = tools;
  if (first) throw unsupported(`tools (${first.name})`, modelId);
  if (toolChoice && toolChoice.type !== "auto" && toolChoice.type !== "none")
    throw unsupported(`toolChoice ${toolChoice.type}`, modelId);
}

function messageOf(
  message: LanguageModelV4Message,
  modelId: string,
  warnings: SharedV4Warning[],
): MessageParam {
  if (message.role === "system") return { role: "system", content: message.content };
  if (message.role === "tool") throw unsupported("messages of tools", modelId);
  let content = "";
  for (const part of message.content) {
    if (part.type === "text") content += part.text;
    // Another model's thoughts, which no chat template has a place for.
    else if (part.type === "reasoning")
      warnings.push({ type: "unsupported", feature: "reasoning in messages", details: "it is left out" });
    else throw unsupported(partName(part), modelId);
  }
  return { role: message.role, content };
}

function partName(part: { readonly type: string; readonly mediaType?: string }): string {
  return `a message's part of type ${part.type}${part.mediaType ? ` (${part.mediaType})` : ""}`;
}

/** As OpenAI's requests ask for JSON. */
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
