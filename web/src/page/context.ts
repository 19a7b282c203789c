/** Conversations that exceed the context: whole turns are left out (tests/vectors/context tests it). */

import { RequestError } from "../protocol/errors.js";
import type { Prompt } from "../protocol/messages.js";
import type { ChatMessage, ContextPolicy, MessageParam } from "../protocol/openai.js";
import type { Prepared } from "./completions.js";
import { checkedMessages } from "./conversation.js";

/**
 * An answer without max_tokens may take 1/ANSWER_SHARE of the context, and any answer at most 1/MOST_SHARE.
 */
const ANSWER_SHARE = 4;
const MOST_SHARE = 2;

/** Most tokens of a prompt that leave room for an answer of `maxTokens`. */
export function promptLimit(contextLength: number, maxTokens: number | null): number {
  const most = Math.max(Math.floor(contextLength / MOST_SHARE), 1);
  return contextLength - Math.min(maxTokens ?? Math.ceil(contextLength / ANSWER_SHARE), most);
}

/**
 * Where each turn begins: at a user's message that follows no other user's message. Messages before the first
 * one belong to the first turn, except the system prompt: the messages of role system or developer at the
 * beginning.
 */
export function turnsOf(messages: readonly Pick<ChatMessage, "role">[]): number[] {
  const isSystem = ({ role }: { readonly role: string }): boolean =>
    role === "system" || role === "developer";
  const first = messages.findIndex((message) => !isSystem(message));
  if (first < 0) return [];
  const isBegin = (at: number): boolean =>
    at === first || (messages[at]?.role === "user" && messages[at - 1]?.role !== "user");
  const begins = messages.map((_, at) => at).filter((at) => at >= first && isBegin(at));
  // A greeting before the first question is left out together with it.
  return messages[first]?.role === "user" ? begins : begins.filter((_, turn) => turn !== 1);
}

/** The messages without their `count` oldest turns. */
export function withoutTurns<M extends Pick<ChatMessage, "role">>(
  messages: readonly M[],
  count: number,
): M[] {
  const begins = turnsOf(messages);
  return [...messages.slice(0, begins[0]), ...messages.slice(begins[count] ?? messages.length)];
}

/** The fewest turns to drop so that the rest has at most `limit` tokens; at most all but the last. */
export async function turnsToDrop<M extends Pick<ChatMessage, "role">>(
  messages: readonly M[],
  limit: number,
  count: (messages: readonly M[]) => Promise<number>,
): Promise<number> {
  let [low, high] = [1, Math.max(turnsOf(messages).length - 1, 0)];
  while (low < high) {
    const middle = Math.floor((low + high) / 2);
    if ((await count(withoutTurns(messages, middle))) <= limit) high = middle;
    else low = middle + 1;
  }
  return high;
}

/** The request with what the policy leaves of its conversation. */
export async function fitContext(
  prepared: Prepared,
  policy: Exclude<ContextPolicy, "error">,
  contextLength: number,
  count: (prompt: Prompt) => Promise<number>,
): Promise<Prepared> {
  const { prompt, options } = prepared;
  if (prompt.kind !== "chat") return prepared;
  const { messages } = prompt;
  const limit = promptLimit(contextLength, options.max_tokens ?? null);
  const countOf = (some: readonly ChatMessage[]): Promise<number> => count({ ...prompt, messages: some });
  const tokens = await countOf(messages);
  if (tokens <= limit) return prepared;
  if (policy === "truncate-oldest") {
    const kept = withoutTurns(messages, await turnsToDrop(messages, limit, countOf));
    return { ...prepared, prompt: { ...prompt, messages: kept }, leftOut: messages.length - kept.length };
  }
  const countTokens = (some: readonly MessageParam[]): Promise<number> => countOf(checkedMessages(some));
  const kept = checkedMessages(await policy({ messages, tokens, limit, contextLength, countTokens }));
  if (prompt.continueLast && kept.at(-1)?.role !== "assistant")
    throw new RequestError(
      "continue_final_message needs a last message of the role assistant; contextPolicy gave another",
      "messages",
    );
  return {
    ...prepared,
    prompt: { ...prompt, messages: kept },
    leftOut: Math.max(messages.length - kept.length, 0),
  };
}
