/**
 * The device: an engine of this package, passed in as an object, so that the SDK does not bring the engine
 * along.
 */

import { DeviceError, throwIfAborted } from "../protocol/errors.js";
import type {
  ChatCompletionChunk,
  ChatCompletionRequest,
  ChatMessage,
  ReadPrompt,
  ReadPromptOptions,
} from "../protocol/openai.js";
import { type ChunkContents, ends, isUseful, pieceOf } from "./leg.js";
import { type HybridRequest, type Message, textOf } from "./openai.js";
import { SERVICE_FIELDS } from "./service-fields.js";
import type { Feature } from "./types.js";
import { within } from "./wait.js";

/** A device that has fallen silent. */
export class StalledError extends DeviceError {}

/** The kind of failure, for reasons. */
export function failureOf(error: DeviceError): "stalled" | "lost" {
  return error instanceof StalledError ? "stalled" : "lost";
}

/** The part of an engine that is used; the one from `createEngine` has all of it. */
export interface DeviceEngine {
  readonly model: {
    readonly name: string;
    readonly contextLength: number;
    /** The checkpoint's SHA-256 and the quantization scheme, to which a fitted router is tied. */
    readonly checkpoint?: string | null;
    readonly quantization?: string;
    /** The number of tokens of the vocabulary, of which records for a fitted router show some. */
    readonly vocabSize?: number;
    /** Features in addition to writing text; logprobs where it does not say. */
    readonly features?: readonly Feature[];
  };
  readonly chat: {
    readonly completions: {
      create(request: ChatCompletionRequest & { stream: true }): Promise<AsyncIterable<ChatCompletionChunk>>;
    };
  };
  /** Tokens of a conversation as the model's prompt, with the tools that may be called. */
  countTokens?(messages: readonly ChatMessage[], tools?: DeviceTools): Promise<number>;
  /** Probabilities of labels after a conversation, for a fitted router that asks the model. */
  decide?(
    messages: readonly ChatMessage[],
    labels: readonly string[],
    options?: object,
  ): Promise<{ readonly options: readonly { readonly probability: number }[] }>;
  /** What the model shows about a conversation before it answers, for a fitted router. */
  readPrompt?(messages: readonly ChatMessage[], options: ReadPromptOptions): Promise<ReadPrompt>;
  /** Tokens that a new request could put into the KV cache now. */
  stats?(): Promise<{ readonly freeTokens: number }>;
}

/** The fields of a request that determine how tools appear in its prompt. */
export type DeviceTools = Pick<ChatCompletionRequest, "tools" | "tool_choice" | "chat_template_kwargs">;

/** Seconds that a device may be silent before it is given up. */
export interface DeviceTimeouts {
  readonly first_token: number;
  readonly between: number;
}

/** Seconds to wait for the engine's state. */
const ASK_SECONDS = 0.5;

/**
 * Yields the answer's pieces. Throws the engine's RequestError, a DeviceError when it fails or falls silent,
 * or the signal's reason.
 */
export async function* deviceStream(
  engine: DeviceEngine | null,
  request: HybridRequest,
  timeouts: DeviceTimeouts,
  signal: AbortSignal,
): AsyncGenerator<ChunkContents> {
  if (!engine) throw new DeviceError("No model is loaded on this device.");
  let complete = false;
  let limit = timeouts.first_token;
  const late = (suspended: boolean): Error =>
    new StalledError(
      suspended
        ? "The device fell silent while the page was suspended."
        : `The device was silent for ${limit} s. It may be too slow for this model, or its driver hangs.`,
    );
  let iterator: AsyncIterator<ChatCompletionChunk> | null = null;
  try {
    const asked = {
      ...fieldsOf(request),
      messages: messagesOf(request),
      stream: true,
      stream_options: { include_usage: true },
      signal,
    } as const;
    const chunks = await within(engine.chat.completions.create(asked), limit, late, signal);
    iterator = chunks[Symbol.asyncIterator]();
    for (;;) {
      const { done, value } = await within(iterator.next(), limit, late, signal);
      if (done) break;
      const piece = pieceOf(value);
      complete ||= ends(piece);
      if (piece.choices.some(isUseful)) limit = timeouts.between;
      yield piece;
    }
  } catch (error) {
    throwIfAborted(signal);
    throw isRequestError(error) || error instanceof DeviceError ? error : failed(error);
  } finally {
    // Not awaited: a hanging device does not end.
    iterator?.return?.().catch(() => undefined);
  }
  throwIfAborted(signal);
  if (!complete) throw new DeviceError("The device's answer ended before it was complete.");
}

/** The fields for the engine, which rejects those that it does not know. */
function fieldsOf(request: HybridRequest): ChatCompletionRequest {
  const service: readonly string[] = SERVICE_FIELDS;
  const fields = Object.entries(request).filter(([name]) => !service.includes(name));
  return Object.fromEntries(fields) as unknown as ChatCompletionRequest;
}

/** Tokens of the prompt; null where the engine cannot count them, or not at once. */
export async function countTokens(engine: DeviceEngine, request: HybridRequest): Promise<number | null> {
  if (!engine.countTokens) return null;
  const { tools, tool_choice, chat_template_kwargs } = request;
  const offered = { ...(tools?.length && { tools, tool_choice }), chat_template_kwargs } as DeviceTools;
  return quickly(engine.countTokens(messagesOf(request), offered));
}

/** Tokens that fit the KV cache now; the context's length where the engine does not know. */
export async function freeTokens(engine: DeviceEngine): Promise<number> {
  const stats = engine.stats ? await quickly(engine.stats()) : null;
  return stats?.freeTokens ?? engine.model.contextLength;
}

async function quickly<T>(answer: Promise<T>): Promise<T | null> {
  try {
    return await within(answer, ASK_SECONDS, () => new DeviceError("The device is busy."));
  } catch {
    // A request for an answer will show whether it works at all.
    return null;
  }
}

/** A request's messages as an engine takes them. */
export function messagesOf({ messages }: HybridRequest): ChatMessage[] {
  return messages.map(asText);
}

/** Converts a message; the engine itself checks the rest. */
function asText(message: Message): ChatMessage {
  const { role, name, tool_calls, tool_call_id, reasoning_content } = message;
  const more = Object.entries({ name, tool_calls, tool_call_id, reasoning_content });
  const given = Object.fromEntries(more.filter(([, value]) => value != null));
  return { ...given, role: role as ChatMessage["role"], content: textOf(message) };
}

/** Checked by name: the engine may come from another copy of the package. */
export function isRequestError(error: unknown): boolean {
  return error instanceof Error && error.name === "RequestError";
}

function failed(error: unknown): DeviceError {
  const { message, code } = error as Partial<DeviceError>;
  return new DeviceError(message ?? String(error), { cause: error, ...(code && { code }) });
}
