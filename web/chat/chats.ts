/** The chats that this browser keeps, in IndexedDB. */

import type { ChatMessage } from "../src/protocol/openai.js";
import type { RouteInfo } from "../src/routing/index.js";
import type { Call } from "./tools.js";

/** One message as it is stored. */
export interface Turn {
  readonly role: "user" | "assistant";
  content: string;
  /** The name of the model that answered. */
  name?: string;
  /** How the answer ended, where that is not obvious. */
  note?: string;
  /** Where the answer came from; only where there was a cloud. */
  info?: RouteInfo;
  /** The answer broke off: neither it nor its question is sent in later requests. */
  failed?: boolean;
  /** Text without markdown: the continuation of a plain prompt. */
  plain?: boolean;
  /** The answer was requested as JSON. */
  json?: boolean;
  /** The tools that were called before the answer, round by round. */
  calls?: readonly (readonly Call[])[];
}

export interface Chat {
  readonly id: string;
  /** The first message, shortened. */
  title: string;
  /** Milliseconds since 1970. */
  readonly created: number;
  changed: number;
  turns: Turn[];
}

const DATABASE = "nearfar-chats";
const STORE = "chats";
const TITLE_LENGTH = 60;

export function newChat(): Chat {
  const now = Date.now();
  return { id: newId(), title: "", created: now, changed: now, turns: [] };
}

/** 128 random bits in hex; an address without https has no crypto.randomUUID. */
function newId(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function titleOf({ turns }: Chat): string {
  const words = (turns[0]?.content ?? "").replace(/\s+/g, " ").trim();
  if (words === "") return "Untitled";
  const letters = [...words];
  return letters.length > TITLE_LENGTH ? `${letters.slice(0, TITLE_LENGTH).join("")}…` : words;
}

/** Whether an answer has anything to show. */
export function hasBegun({ content, calls = [] }: Turn): boolean {
  return content !== "" || calls.length > 0;
}

/** The messages for the model: a question without an answer is left out, unless it is the last. */
export function messagesOf({ turns }: Chat, withCalls: boolean): ChatMessage[] {
  const isAnswered = (at: number): boolean => {
    const next = turns[at + 1];
    return next === undefined || (next.role === "assistant" && next.failed !== true);
  };
  return turns
    .filter((turn, at) => (turn.role === "user" ? isAnswered(at) : turn.failed !== true))
    .flatMap(({ role, content, calls = [] }) => [
      ...(withCalls ? calls.flatMap(messagesOfCalls) : []),
      { role, content },
    ]);
}

/** One round of calls as messages for the model: its calls, and their results. */
export function messagesOfCalls(calls: readonly Call[]): ChatMessage[] {
  const asked = calls.map(({ id, name, arguments: given }) => ({
    id,
    type: "function" as const,
    function: { name, arguments: given },
  }));
  const told = calls.map(({ id, result }) => ({ role: "tool" as const, content: result, tool_call_id: id }));
  return [{ role: "assistant", content: "", tool_calls: asked }, ...told];
}

/** All methods reject where the browser keeps nothing, as in some private windows. */
export class ChatStore {
  #opened: Promise<IDBDatabase> | null = null;

  /** Lists the chats, the last changed first. */
  async list(): Promise<Chat[]> {
    const chats = await this.#run<Chat[]>("readonly", (store) => store.getAll());
    return chats.sort((a, b) => b.changed - a.changed);
  }

  async read(id: string): Promise<Chat | null> {
    return (await this.#run<Chat | undefined>("readonly", (store) => store.get(id))) ?? null;
  }

  async write(chat: Chat): Promise<void> {
    await this.#run("readwrite", (store) => store.put(chat));
  }

  async delete(id: string): Promise<void> {
    await this.#run("readwrite", (store) => store.delete(id));
  }

  async clear(): Promise<void> {
    await this.#run("readwrite", (store) => store.clear());
  }

  async #run<T>(mode: IDBTransactionMode, ask: (store: IDBObjectStore) => IDBRequest): Promise<T> {
    this.#opened ??= open();
    const transaction = (await this.#opened).transaction(STORE, mode);
    const request = ask(transaction.objectStore(STORE));
    return new Promise((resolve, reject) => {
      transaction.oncomplete = () => resolve(request.result as T);
      transaction.onabort = () => reject(transaction.error);
      transaction.onerror = () => reject(transaction.error);
    });
  }
}

function open(): Promise<IDBDatabase> {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
