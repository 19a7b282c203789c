/** nearfar as a model of the AI SDK (the `ai` package): `streamText({ model: nearfar(engine), … })`. */

import type {
  EmbeddingModelV4,
  EmbeddingModelV4CallOptions,
  EmbeddingModelV4Result,
  LanguageModelV4,
  LanguageModelV4CallOptions,
  LanguageModelV4GenerateResult,
  LanguageModelV4StreamResult,
} from "@ai-sdk/provider";
import { type Answerer, ask, streamedChat, wholeChat } from "../protocol/answerer.js";
import type { EmbeddingResponse } from "../protocol/openai.js";
import { streamOf } from "../protocol/streams.js";
import { contentOf, finishReasonOf, metadataOf, partsOf, usageOf } from "./replies.js";
import { prepare } from "./requests.js";

export type { Answerer } from "../protocol/answerer.js";

/** Options of the AI SDK's model. */
export interface NearfarModelOptions {
  /** The model's id for the AI SDK; by default the name of the engine's model. */
  readonly modelId?: string;
}

/**
 * A language model of the AI SDK that `engine` answers. Parameters that the AI SDK's call options lack go
 * through `providerOptions: { nearfar: { min_p, repetition_penalty, … } }`, with the names of the engine's
 * requests.
 *
 * Provider tools and files are rejected with UnsupportedFunctionalityError.
 */
export function nearfar(engine: Answerer, options: NearfarModelOptions = {}): LanguageModelV4 {
  return new NearfarModel(engine, options.modelId ?? engine.model?.name ?? "hybrid");
}

class NearfarModel implements LanguageModelV4 {
  readonly specificationVersion = "v4";
  readonly provider = "nearfar";
  /** Empty, because the engine fetches no file that a message names. */
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
      content: choice ? contentOf(choice) : [],
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

/**
 * An embedding model of the AI SDK that `engine` answers; the engine must have loaded a model that gives
 * embeddings. `providerOptions: { nearfar: { dimensions } }` asks for the first values of each embedding.
 */
export function embeddingModel(engine: Answerer, options: NearfarModelOptions = {}): EmbeddingModelV4 {
  const { embeddings } = engine;
  if (!embeddings) throw new TypeError("this client has no embeddings: give an engine of nearfar");
  return {
    specificationVersion: "v4",
    provider: "nearfar",
    modelId: options.modelId ?? engine.model?.name ?? "nearfar",
    maxEmbeddingsPerCall: 2048,
    supportsParallelCalls: true,
    async doEmbed(asked: EmbeddingModelV4CallOptions): Promise<EmbeddingModelV4Result> {
      const { values: input, abortSignal: signal, providerOptions } = asked;
      const request = { ...providerOptions?.nearfar, input, ...(signal && { signal }) };
      const { data, usage } = (await ask(embeddings, request)) as EmbeddingResponse;
      return {
        embeddings: data.map(({ embedding }) => embedding as number[]),
        usage: { tokens: usage.prompt_tokens },
        warnings: [],
      };
    },
  };
}
