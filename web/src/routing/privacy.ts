/**
 * Privacy belongs to the text: what a private request carried stays on the device, whoever carries it again.
 * As in Python.
 */

import type { Message } from "./openai.js";

/**
 * Characters from which a message is known again wherever it stands; shorter ones only as the beginning they
 * were.
 */
const LONG = 32;
/** Marks that are kept; those used longest ago are forgotten first. */
const REMEMBERED = 20_000;
/** Characters in a row that make an error's message a quotation. */
const QUOTE = 12;

/**
 * Knows again what was private: by the conversation's id, by the messages it begins with, by each message of
 * some length. Texts are kept as hashes, in memory only.
 */
export class PrivateTexts {
  readonly #marks = new Set<string>();
  readonly #conversations: Set<string>;

  constructor(conversations: readonly string[] = []) {
    this.#conversations = new Set(conversations);
  }

  /** Ids of private conversations, to keep from visit to visit. */
  get conversations(): string[] {
    return [...this.#conversations];
  }

  /** Whether a request has something of a private one. */
  carries(messages: readonly Message[], conversation: string | null): boolean {
    const { begun, long } = marksOf(messages);
    const known = [...begun, ...long].filter((mark) => this.#marks.has(mark));
    for (const mark of known) keep(this.#marks, mark);
    return known.length > 0 || (conversation !== null && this.#conversations.has(conversation));
  }

  /** A private request, or a private answer as a message. */
  remember(messages: readonly Message[], conversation: string | null): void {
    if (conversation !== null) keep(this.#conversations, conversation);
    const { begun, long } = marksOf(messages);
    for (const mark of [...begun.slice(-1), ...long]) keep(this.#marks, mark);
  }
}

/** An error's message as it may be shown and logged: not if it has something of the prompt in it. */
export function withoutQuotes(message: string, messages: readonly Message[]): string {
  const said = message.slice(0, 2000);
  const quoted = messages.map(saidBy).some((text) => {
    if (text.length < QUOTE) return text.length >= 4 && said.includes(text);
    for (let at = 0; at + QUOTE <= said.length; at++)
      if (text.includes(said.slice(at, at + QUOTE))) return true;
    return false;
  });
  return quoted ? "The message is left out, for it quotes the prompt." : said;
}

function keep(kept: Set<string>, item: string): void {
  // Deleted first, so that it is the one used last.
  kept.delete(item);
  kept.add(item);
  const [oldest] = kept;
  if (kept.size > REMEMBERED && oldest !== undefined) kept.delete(oldest);
}

/**
 * Marks of each beginning, and of each long message. What an application says to all (system) is nobody's
 * secret.
 */
function marksOf(messages: readonly Message[]): { readonly begun: string[]; readonly long: string[] } {
  const begun: string[] = [];
  const long: string[] = [];
  let chain = "";
  for (const message of messages) {
    if (message.role === "system" || message.role === "developer") continue;
    const text = saidBy(message).trim().replace(/\s+/g, " ");
    if (text.length >= LONG) long.push(hash(text));
    chain = hash(`${chain}\0${message.role}\0${text}`);
    begun.push(chain);
  }
  return { begun, long };
}

/** All that a message says: text, other parts and calls as JSON. */
function saidBy({ content, tool_calls }: Message): string {
  const parts = Array.isArray(content) ? content : [content ?? ""];
  const said = parts.map((part) =>
    typeof part === "string" ? part : part.type === "text" ? (part.text ?? "") : JSON.stringify(part),
  );
  return said.join("") + (tool_calls?.length ? JSON.stringify(tool_calls) : "");
}

/** 64 bits (two of cyrb53's lanes). A collision makes a text private that is not, which harms nobody. */
function hash(text: string): string {
  let a = 0xdeadbeef;
  let b = 0x41c6ce57;
  for (let at = 0; at < text.length; at++) {
    const code = text.charCodeAt(at);
    a = Math.imul(a ^ code, 2654435761);
    b = Math.imul(b ^ code, 1597334677);
  }
  a = Math.imul(a ^ (a >>> 16), 2246822507) ^ Math.imul(b ^ (b >>> 13), 3266489909);
  b = Math.imul(b ^ (b >>> 16), 2246822507) ^ Math.imul(a ^ (a >>> 13), 3266489909);
  return `${(a >>> 0).toString(36)}.${(b >>> 0).toString(36)}.${text.length.toString(36)}`;
}
