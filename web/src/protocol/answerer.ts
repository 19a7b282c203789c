import type { ChatCompletion, ChatCompletionChunk, ChatCompletionRequest } from "./openai.js";

/**
 * What the adapters for other people's interfaces stand on: an `Engine`, of whichever entry of this package,
 * or a `HybridClient` of nearfar/routing. By shape, because each entry may hold its own copy of the classes.
 */
export interface Answerer {
  readonly chat: { readonly completions: Endpoint };
  /** Plain text completions; a HybridClient has none. */
  readonly completions?: Endpoint;
  /** Embeddings, for models that give them; a HybridClient has none. */
  readonly embeddings?: Endpoint;
  /** The model that is loaded; a HybridClient has none of its own. */
  readonly model?: { readonly name: string };
}

/** One of OpenAI's endpoints; the request's type is the engine's business. */
export interface Endpoint {
  create(request: never): Promise<unknown>;
}

/** Asks an endpoint for what may be of any shape: it is checked there. */
export function ask(endpoint: Endpoint, request: object): Promise<unknown> {
  return endpoint.create(request as never);
}

/** A chat's answer as a whole. */
export function wholeChat({ chat }: Answerer, request: ChatCompletionRequest): Promise<ChatCompletion> {
  return ask(chat.completions, request) as Promise<ChatCompletion>;
}

/** A chat's answer in pieces, the usage in the last one. Leaving the loop over them ends the answer. */
export function streamedChat(
  { chat }: Answerer,
  request: ChatCompletionRequest,
): Promise<AsyncIterable<ChatCompletionChunk>> {
  const streamed = { ...request, stream: true, stream_options: { include_usage: true } };
  return ask(chat.completions, streamed) as Promise<AsyncIterable<ChatCompletionChunk>>;
}
