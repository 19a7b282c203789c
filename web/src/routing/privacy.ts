/**
 * Privacy belongs to the text: the texts of a private request stay on the device, also in later requests that
 * carry or quote them. routing/privacy.py does the same.
 */

import type { HybridRequest, Message } from "./openai.js";
import { letters, WINDOW, windows } from "./quotes.js";

/**
 * Characters from which a whole message is recognized anywhere; a shorter one only as the same beginning of a
 * conversation.
 */
const LONG = 32;
/** Most texts, conversations and windows that are kept; the least recently used are forgotten first. */
const REMEMBERED = 20_000;
const WINDOWS = 100_000;
/** Most marks of each kind that are stored between visits: 280 kB in all. */
const KEPT = 20_000;
/** Characters in a row that make an error message a quotation. */
const QUOTE = 12;
/** Fields of messages and parts that carry no text of the user. */
const UNSAID: ReadonlySet<string> = new Set(["role", "type", "id", "tool_call_id"]);
/** Types of parts that are files. */
const FILES: ReadonlySet<string> = new Set(["image_url", "input_audio", "video_url", "file"]);

/**
 * The stored state of private texts: ids of conversations, and hashes (separated by blanks) under the key
 * stored with them. It contains no text.
 */
export interface PrivateRecord {
  readonly key: readonly [number, number];
  readonly conversations: readonly string[];
  readonly texts: string;
  readonly windows: string;
}

/**
 * Hashes of a request's texts: of each beginning of the conversation, of each long message, and of the
 * windows of all texts and files; `own` has the windows of the user's own texts.
 */
export interface Marks {
  readonly begun: readonly string[];
  readonly whole: readonly string[];
  readonly windows: ReadonlySet<string>;
  readonly own: ReadonlySet<string>;
}

/**
 * Recognizes private texts: by the conversation's id, by the messages it begins with, by each long message,
 * and by quotations anywhere.
 */
export class PrivateTexts {
  readonly #key: readonly [number, number];
  readonly #conversations: Set<string>;
  readonly #texts: Set<string>;
  readonly #windows: Set<string>;

  /** `kept`: a record, or the ids of conversations alone (the old form). */
  constructor(kept: PrivateRecord | readonly string[] = []) {
    const record = "key" in kept ? kept : null;
    const [a = 0, b = 0] = record?.key ?? crypto.getRandomValues(new Uint32Array(2));
    this.#key = [a, b];
    this.#conversations = new Set(record?.conversations ?? (kept as readonly string[]));
    this.#texts = new Set(record?.texts.split(" ").filter(Boolean));
    this.#windows = new Set(record?.windows.split(" ").filter(Boolean));
  }

  /** The state to store between visits. */
  record(): PrivateRecord {
    return {
      key: this.#key,
      conversations: [...this.#conversations],
      texts: [...this.#texts].slice(-KEPT).join(" "),
      windows: [...this.#windows].slice(-KEPT).join(" "),
    };
  }

  /**
   * Computes the marks of a request. Texts that an application sends to all (the system prompt, tools, other
   * parameters) are not secret, so their windows are not the user's own; but they may quote a private text.
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

  /** Whether a request carries an earlier private text again ("earlier") or quotes one ("quote"). */
  known({ begun, whole, windows }: Marks, conversation: string | null): "earlier" | "quote" | null {
    const texts = used(this.#texts, [...begun, ...whole]);
    const quoted = used(this.#windows, windows);
    if (texts || (conversation !== null && this.#conversations.has(conversation))) return "earlier";
    return quoted ? "quote" : null;
  }

  /** Remembers a private request, or a private answer as a message. Returns whether anything was new. */
  remember({ begun, whole, own }: Marks, conversation: string | null): boolean {
    const told = this.rememberConversation(conversation);
    const texts = add(this.#texts, [...begun.slice(-1), ...whole], REMEMBERED);
    return add(this.#windows, own, WINDOWS) || texts || told;
  }

  /**
   * Remembers the conversation of a request that quotes a private text. Its other texts are not remembered,
   * since they may be an application's own.
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

/** Returns an error message for display and logs; a message that quotes the prompt is replaced. */
export function withoutQuotes(message: string, messages: readonly Message[]): string {
  const said = message.slice(0, 2000);
  const quoted = messages.map(saidBy).some((text) => {
    if (text.length < QUOTE) return text.length >= 4 && said.includes(text);
    for (let at = 0; at + QUOTE <= said.length; at++)
      if (text.includes(said.slice(at, at + QUOTE))) return true;
    return false;
  });
  return quoted ? "The message is omitted, because it quotes the prompt." : said;
}

/** Whether any of the marks is kept; kept ones become the most recently used. */
function used(kept: Set<string>, marks: Iterable<string>): boolean {
  const found = [...marks].filter((mark) => kept.has(mark));
  add(kept, found, Number.POSITIVE_INFINITY);
  return found.length > 0;
}

/** Adds items; returns whether one was new. */
function add(kept: Set<string>, items: Iterable<string>, most: number): boolean {
  let added = false;
  for (const item of items) {
    // Deleted first, so that it becomes the most recently used one.
    added = !kept.delete(item) || added;
    kept.add(item);
    if (kept.size <= most) continue;
    const [oldest] = kept;
    if (oldest !== undefined) kept.delete(oldest);
  }
  return added;
}

/**
 * Yields every text in messages and parameters, at any depth (content, parts, reasoning, calls and results of
 * tools), and whether it is a picture, a sound or another file, which is recognized only as a whole.
 */
function* strings(value: unknown, isFile = false): Generator<readonly [string, boolean]> {
  if (typeof value === "string") yield [value, isFile];
  else if (Array.isArray(value)) for (const item of value) yield* strings(item, isFile);
  else if (typeof value === "object" && value !== null)
    for (const [name, item] of Object.entries(value))
      if (!UNSAID.has(name))
        yield* strings(item, isFile || (FILES.has(name) && (value as { type?: unknown }).type === name));
}

/** The whole content of a message: text, and other parts and calls as JSON. */
function saidBy({ content, tool_calls }: Message): string {
  const parts = Array.isArray(content) ? content : [content ?? ""];
  const said = parts.map((part) =>
    typeof part === "string" ? part : part.type === "text" ? (part.text ?? "") : JSON.stringify(part),
  );
  return said.join("") + (tool_calls?.length ? JSON.stringify(tool_calls) : "");
}

/**
 * A hash of 64 bits (two of cyrb53's lanes, which begin with the key). A collision makes a text private that
 * is not, which is harmless.
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
