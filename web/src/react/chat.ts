import { useCallback, useInsertionEffect, useRef, useState } from "react";
import { type Answerer, streamedChat } from "../protocol/answerer.js";
import type { ChatCompletionRequest, ChatMessage, Usage } from "../protocol/openai.js";
import { useLatest } from "./latest.js";

/** What a request may say beside its messages. */
export type SendOptions = Omit<
  ChatCompletionRequest,
  "messages" | "signal" | "stream" | "stream_options" | "n"
>;

/** What every request of a conversation has. */
export interface ChatOptions {
  /** Stands before every conversation; it is no part of `messages`. */
  readonly system?: string;
  readonly initialMessages?: readonly ChatMessage[];
  /** Parameters of every request: temperature, max_tokens and the like. */
  readonly request?: SendOptions;
}

/** A conversation, and what a page does with it. */
export interface Chat {
  readonly messages: readonly ChatMessage[];
  readonly status: "idle" | "answering";
  /** What ended the last answer, where it was no end of its own; the text that there was is kept. */
  readonly error: Error | null;
  /** Tokens of the last answer that came to its end. */
  readonly usage: Usage | null;
  /**
   * Adds the user's message and the model's answer to it, piece by piece; resolves when that is over, however
   * it ended. Rejects where there is no model yet, or an answer is still being written.
   */
  readonly send: (content: string, request?: SendOptions) => Promise<void>;
  /** Ends the answer; what there is of it is kept. */
  readonly stop: () => void;
  /** Another conversation, or none; ends the answer. */
  readonly setMessages: (messages: readonly ChatMessage[]) => void;
}

/** Where a conversation is: state of React, and at once for `send`, which may come before the next render. */
interface Conversation {
  messages: readonly ChatMessage[];
  answering: AbortController | null;
}

/** A conversation with an Engine, or a HybridClient of nearfar/routing; null while there is none. */
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
  // Another engine, or none, cannot go on with an answer: over before `latest` has it, as it may be asked at once.
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
