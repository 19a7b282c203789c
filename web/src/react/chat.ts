import { useCallback, useInsertionEffect, useRef, useState } from "react";
import { type Answerer, streamedChat } from "../protocol/answerer.js";
import type { ChatCompletionRequest, ChatMessage, Usage } from "../protocol/openai.js";
import { useLatest } from "./latest.js";

/** The fields of a request beside its messages. */
export type SendOptions = Omit<
  ChatCompletionRequest,
  "messages" | "signal" | "stream" | "stream_options" | "n"
>;

/** Options of every request in a conversation. */
export interface ChatOptions {
  /** The system message of every conversation; it is not part of `messages`. */
  readonly system?: string;
  readonly initialMessages?: readonly ChatMessage[];
  /** Parameters of every request: temperature, max_tokens and the like. */
  readonly request?: SendOptions;
}

/** A conversation, and the actions of a page on it. */
export interface Chat {
  readonly messages: readonly ChatMessage[];
  readonly status: "idle" | "answering";
  /** The error that ended the last answer, if one did; the text so far is kept. */
  readonly error: Error | null;
  /** The usage of the last complete answer. */
  readonly usage: Usage | null;
  /**
   * Adds the user's message and the model's answer to it, piece by piece; resolves when the answer has ended,
   * in whatever way. Rejects if there is no model yet, or while an answer is being written.
   */
  readonly send: (content: string, request?: SendOptions) => Promise<void>;
  /** Ends the answer and keeps the text so far. */
  readonly stop: () => void;
  /** Replaces the conversation, and ends the answer. */
  readonly setMessages: (messages: readonly ChatMessage[]) => void;
}

/**
 * The state of a conversation: as React state for rendering, and as a current value for `send`, which may be
 * called before the next render.
 */
interface Conversation {
  messages: readonly ChatMessage[];
  answering: AbortController | null;
}

/**
 * A conversation with an Engine, or with a HybridClient of nearfar/routing; `engine` is null while there is
 * none.
 */
export function useChat(engine: Answerer | null, options: ChatOptions = {}): Chat {
  const { current } = useRef<Conversation>({ messages: options.initialMessages ?? [], answering: null });
  const [messages, show] = useState(current.messages);
  const [status, setStatus] = useState<Chat["status"]>("idle");
  const [error, setError] = useState<Error | null>(null);
  const [usage, setUsage] = useState<Usage | null>(null);
  const latest = useLatest({ engine, options });

  const put = useCallback(
    (next: readonly ChatMessage[]): void => {
      current.messages = next;
      show(next);
    },
    [current],
  );
  const stop = useCallback((): void => current.answering?.abort(), [current]);
  // A new engine cannot continue an answer of the previous one, so the answer is stopped before `latest`
  // holds the new engine, which may be asked at once.
  useInsertionEffect(() => stop, [stop, engine]);

  const send = useCallback(
    async (content: string, request: SendOptions = {}): Promise<void> => {
      const { engine, options } = latest.current;
      if (!engine) throw new Error("There is no model yet: send when the status is ready.");
      if (current.answering) throw new Error("An answer is being written: stop it first, or wait.");
      const controller = new AbortController();
      const isLast = (): boolean => current.answering === controller;
      current.answering = controller;
      setStatus("answering");
      setError(null);
      const asked: readonly ChatMessage[] = [...current.messages, { role: "user", content }];
      put(asked);
      try {
        const system: ChatMessage[] = options.system ? [{ role: "system", content: options.system }] : [];
        const chunks = await streamedChat(engine, {
          ...options.request,
          ...request,
          messages: [...system, ...asked],
          signal: controller.signal,
        });
        let answer = "";
        for await (const { choices, usage } of chunks) {
          if (!isLast()) return;
          const piece = choices[0]?.delta.content;
          if (piece) answer += piece;
          if (piece) put([...asked, { role: "assistant", content: answer }]);
          if (usage) setUsage(usage);
        }
      } catch (failure) {
        if (isLast() && !controller.signal.aborted)
          setError(failure instanceof Error ? failure : new Error(String(failure)));
      } finally {
        if (isLast()) {
          current.answering = null;
          setStatus("idle");
        }
      }
    },
    [current, latest, put],
  );
  const setMessages = useCallback(
    (next: readonly ChatMessage[]): void => {
      current.answering?.abort();
      current.answering = null;
      setStatus("idle");
      setError(null);
      put(next);
    },
    [current, put],
  );
  return { messages, status, error, usage, send, stop, setMessages };
}
