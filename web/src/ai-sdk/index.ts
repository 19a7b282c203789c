/** nearfar as a model of the AI SDK (the `ai` package): `streamText({ model: nearfar(engine), … })`. */

import type {
  LanguageModelV4,
  LanguageModelV4CallOptions,
  LanguageModelV4GenerateResult,
  LanguageModelV4StreamResult,
} from "@ai-sdk/provider";
import { type Answerer, streamedChat, wholeChat } from "../both/answers.js";
import { streamOf } from "../both/streams.js";
import { finishReasonOf, metadataOf, partsOf, usageOf } from "./replies.js";
import { prepare } from "./requests.js";

export type { Answerer } from "../both/answers.js";

export interface NearfarModelOptions {
  /** What the AI SDK calls the model; by default the name of the one that the engine has. */
  readonly modelId?: string;
}

/**
 * A language model of the AI SDK that `engine` answers. What its call options cannot say goes through
 * `providerOptions: { nearfar: { min_p, repetition_penalty, … } }`, by the names of the engine's requests.
 *
 * Tools and files are refused with UnsupportedFunctionalityError; there are no embeddings.
 */
export function nearfar(engine: Answerer, options: NearfarModelOptions = {}): LanguageModelV4 {
  return new NearfarModel(engine, options.modelId ?? engine.model?.name ?? "hybrid");
}

class NearfarModel implements LanguageModelV4 {
  readonly specificationVersion = "v4";
  readonly provider = "nearfar";
  /** The engine fetches nothing that a message names. */
  readonly supportedUrls = {};

  constructor(
    private readonly engine: Answerer,
    readonly modelId: string,
  ) {}

  async doGenerate(options: LanguageModelV4CallOptions): Promise<LanguageModelV4GenerateResult> {
    const { request, warnings } = prepare(options, this.modelId);
    const answer = await wholeChat(this.engine, request);
    const [choice] = answer.choices;
    return {
      content: choice?.message.content ? [{ type: "text", text: choice.message.content }] : [],
      finishReason: finishReasonOf(choice?.finish_reason ?? null),
      usage: usageOf(answer.usage),
      response: metadataOf(answer),
      warnings,
    };
  }

  async doStream(options: LanguageModelV4CallOptions): Promise<LanguageModelV4StreamResult> {
    const { request, warnings } = prepare(options, this.modelId);
    const chunks = await streamedChat(this.engine, request);
    return { stream: streamOf(partsOf(chunks, warnings, options)) };
  }
}
