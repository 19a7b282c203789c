/**
 * Privacy belongs to the text: what a private request carried stays on the device, whoever carries or quotes it
 * again. As in Python.
 */

import type { HybridRequest, Message } from "./openai.js";
import { letters, WINDOW, windows } from "./quotes.js";

/**
 * Characters from which a whole message is known again wherever it stands; shorter ones only as the beginning
 * they were.
 */
const LONG = 32;
/** Texts, conversations and windows that are kept; those used longest ago are forgotten first. */
const REMEMBERED = 20_000;
const WINDOWS = 100_000;
/** Marks of each kind that are kept from visit to visit: 280 kB in all. */
const KEPT = 20_000;
/** Characters in a row that make an error's message a quotation. */
const QUOTE = 12;
/** Fields of messages and their parts that say nothing. */
const UNSAID: ReadonlySet<string> = new Set(["role", "type", "id", "tool_call_id"]);
/** Parts that are no text. */
const FILES: ReadonlySet<string> = new Set(["image_url", "input_audio", "video_url", "file"]);

/**
 * What is kept of private texts from visit to visit: ids of conversations, and hashes (separated by blanks) under
 * a key that lies beside them. No text.
 */
export interface PrivateRecord {
  readonly key: readonly [number, number];
  readonly conversations: readonly string[];
  readonly texts: string;
  readonly windows: string;
}

/**
 * Hashes of what a request says: of each of its beginnings, of each long message, of the windows of all its texts
 * and of its files; and of those of them that are its user's own.
 */
export interface Marks {
  readonly begun: readonly string[];
  readonly whole: readonly string[];
  readonly windows: ReadonlySet<string>;
  readonly own: ReadonlySet<string>;
}

/**
 * Knows again what was private: by the conversation's id, by the messages it begins with, by each message of
 * some length, by quotations wherever they stand.
 */
export class PrivateTexts {
  readonly #key: readonly [number, number];
  readonly #conversations: Set<string>;
  readonly #texts: Set<string>;
  readonly #windows: Set<string>;

  /** `kept`: a record, or in the old form the ids of conversations alone. */
  constructor(kept: PrivateRecord | readonly string[] = []) {
    const record = "key" in kept ? kept : null;
    const [a = 0, b = 0] = record?.key ?? crypto.getRandomValues(new Uint32Array(2));
    this.#key = [a, b];
    this.#conversations = new Set(record?.conversations ?? (kept as readonly string[]));
    this.#texts = new Set(record?.texts.split(" ").filter(Boolean));
    this.#windows = new Set(record?.windows.split(" ").filter(Boolean));
  }

  /** What is kept from visit to visit. */
  record(): PrivateRecord {
    return {
      key: this.#key,
      conversations: [...this.#conversations],
      texts: [...this.#texts].slice(-KEPT).join(" "),
      windows: [...this.#windows].slice(-KEPT).join(" "),
    };
  }

  /**
   * The marks of a request. What an application says to all (the system prompt, tools, other parameters) is nobody's secret,
   * so its windows are not the user's own; but it may quote what is one.
   */
  marks({ messages, ...params }: Pick<HybridRequest, "messages"> & object): Marks {
    const begun: string[] = [];
    const whole: string[] = [];
    const own = new Set<string>();
    const all = new Set(this.#marksWithin(params));
    let chain = "";
    for (const message of messages) {
      const found = this.#marksWithin(message);
      for (const mark of found) all.add(mark);
      if (message.role === "system" || message.role === "developer") continue;
      for (const mark of found) own.add(mark);
      const text = saidBy(message).trim().replace(/\s+/g, " ");
      if (text.length >= LONG) whole.push(this.#mark(text));
      chain = this.#mark(`${chain}\0${message.role}\0${text}`);
      begun.push(chain);
    }
    return { begun, whole, windows: all, own };
  }

  /** Whether a request carries a text of a private one again, or quotes one. */
  known({ begun, whole, windows }: Marks, conversation: string | null): "earlier" | "quote" | null {
    const texts = used(this.#texts, [...begun, ...whole]);
    const quoted = used(this.#windows, windows);
    if (texts || (conversation !== null && this.#conversations.has(conversation))) return "earlier";
    return quoted ? "quote" : null;
  }

  /** A private request, or a private answer as a message. Gives whether there was something new. */
  remember({ begun, whole, own }: Marks, conversation: string | null): boolean {
    const told = this.rememberConversation(conversation);
    const texts = add(this.#texts, [...begun.slice(-1), ...whole], REMEMBERED);
    return add(this.#windows, own, WINDOWS) || texts || told;
  }

  /**
   * A request that quotes a private text: the conversation stays, and what is not of the quotation may be what an
   * application says to all.
   */
  rememberConversation(conversation: string | null): boolean {
    return add(this.#conversations, conversation === null ? [] : [conversation], REMEMBERED);
  }

  /** The marks of all windows of a value's texts together, and of each of its files. */
  #marksWithin(value: object): string[] {
    const said = [...strings(value)];
    const data = letters(said.flatMap(([text, isFile]) => (isFile ? [] : [text])).join("\n"));
    const found = windows(data).map((at) => hash(this.#key, data.subarray(at, at + WINDOW)));
    const files = said.filter(([text, isFile]) => isFile && text.length >= LONG);
    return [...found, ...files.map(([text]) => this.#mark(text))];
  }

  #mark(text: string): string {
    return hash(this.#key, new TextEncoder().encode(text));
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

/** Whether one of the marks is kept; those that are were used last. */
function used(kept: Set<string>, marks: Iterable<string>): boolean {
  const found = [...marks].filter((mark) => kept.has(mark));
  add(kept, found, Number.POSITIVE_INFINITY);
  return found.length > 0;
}

/** Gives whether one was not there. */
function add(kept: Set<string>, items: Iterable<string>, most: number): boolean {
  let added = false;
  for (const item of items) {
    // Deleted first, so that it is the one used last.
    added = !kept.delete(item) || added;
    kept.add(item);
    if (kept.size <= most) continue;
    const [oldest] = kept;
    if (oldest !== undefined) kept.delete(oldest);
  }
  return added;
}

/**
 * Every text in messages and parameters, however deep: content, parts, reasoning, calls and results of tools. And
 * whether it is of a picture, a sound or another file, which is known again as a whole.
 */
function* strings(value: unknown, isFile = false): Generator<readonly [string, boolean]> {
  if (typeof value === "string") yield [value, isFile];
  else if (Array.isArray(value)) for (const item of value) yield* strings(item, isFile);
  else if (typeof value === "object" && value !== null)
    for (const [name, item] of Object.entries(value))
      if (!UNSAID.has(name))
        yield* strings(item, isFile || (FILES.has(name) && (value as { type?: unknown }).type === name));
}

/** All that a message says: text, other parts and calls as JSON. */
function saidBy({ content, tool_calls }: Message): string {
  const parts = Array.isArray(content) ? content : [content ?? ""];
  const said = parts.map((part) =>
    typeof part === "string" ? part : part.type === "text" ? (part.text ?? "") : JSON.stringify(part),
  );
  return said.join("") + (tool_calls?.length ? JSON.stringify(tool_calls) : "");
}

/**
 * 64 bits (two of cyrb53's lanes, which begin with the key). A collision makes a text private that is not, which
 * harms nobody.
 */
function hash([first, second]: readonly [number, number], bytes: Uint8Array): string {
  let a = first ^ 0xdeadbeef;
  let b = second ^ 0x41c6ce57;
  for (const byte of bytes) {
    a = Math.imul(a ^ byte, 2654435761);
    b = Math.imul(b ^ byte, 1597334677);
  }
  a = Math.imul(a ^ (a >>> 16), 2246822507) ^ Math.imul(b ^ (b >>> 13), 3266489909);
  b = Math.imul(b ^ (b >>> 16), 2246822507) ^ Math.imul(a ^ (a >>> 13), 3266489909);
  return `${(a >>> 0).toString(36)}.${(b >>> 0).toString(36)}`;
}
