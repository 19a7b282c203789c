"use client";
/** nearfar in React: `useNearfar(url)` loads a model together with the component, and chats with it. */

import { type Chat, type ChatOptions, useChat } from "./chat.js";
import { type EngineState, type UseEngineOptions, useEngine } from "./engine.js";

export { type Chat, type ChatOptions, type SendOptions, useChat } from "./chat.js";
export { type EngineState, type UseEngineOptions, useEngine } from "./engine.js";

/** Options of the engine and of the conversation with it. */
export interface UseNearfarOptions extends UseEngineOptions, ChatOptions {}

/** The result of {@link useNearfar}: the state of the engine, and the conversation. */
export type Nearfar = EngineState & { readonly chat: Chat };

/**
 * Loads the model at `url`, which lives as long as the component, and starts a conversation with it. With
 * null, nothing is loaded yet. Call it once, high in the tree, because each call loads a model of its own.
 */
export function useNearfar(url: string | URL | null, options: UseNearfarOptions = {}): Nearfar {
  const { system, initialMessages, request, ...loading } = options;
  const state = useEngine(url, loading);
  return { ...state, chat: useChat(state.engine, options) };
}
