import type { ChatCompletion, ChatCompletionChunk, ChatCompletionRequest } from "./openai.js";

/**
 * The part of an `Engine`, or of a `HybridClient` of nearfar/routing, that adapters for other interfaces
 * need. It is an interface and not a class, because each entry of the package may have its own copy of the
 * classes.
 */
export interface Answerer {
  readonly chat: { readonly completions: Endpoint };
  /** OpenAI's Responses API. */
  readonly responses?: Endpoint;
  /** Plain text completions; a HybridClient lacks them. */
  readonly completions?: Endpoint;
  /** Embeddings, for models that give them; a HybridClient lacks them. */
  readonly embeddings?: Endpoint;
  /** The model that is loaded; a HybridClient has no model of its own. */
  readonly model?: { readonly name: string };
}

/** One of OpenAI's endpoints. The engine checks the request. */
export interface Endpoint {
  create(request: never): Promise<unknown>;
}

/** Sends an endpoint a request of any shape; the endpoint checks it. */
export function ask(endpoint: Endpoint, request: object): Promise<unknown> {
  return endpoint.create(request as never);
}

/** Requests a chat answer as a whole. */
export function wholeChat({ chat }: Answerer, request: ChatCompletionRequest): Promise<ChatCompletion> {
  return ask(chat.completions, request) as Promise<ChatCompletion>;
}

/**
 * Requests a chat answer in pieces, with the usage in the last one. Leaving the loop over the pieces ends the
 * answer.
 */
export function streamedChat(
  { chat }: Answerer,
  request: ChatCompletionRequest,
): Promise<AsyncIterable<ChatCompletionChunk>> {
  const streamed = { ...request, stream: true, stream_options: { include_usage: true } };
  return ask(chat.completions, streamed) as Promise<AsyncIterable<ChatCompletionChunk>>;
}
