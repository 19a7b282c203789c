/** The list of chats: opens, exports and deletes them. */

import { type Chat, ChatStore, titleOf } from "./chats.js";
import { button } from "./copy.js";
import { element, say } from "./dom.js";
import { download, toJson, toMarkdown } from "./export.js";

/** Key of the chat that is open in this tab; another tab has its own. */
const OPEN = "nearfar.chat";
/** Key of the chat as it was when the page ended: IndexedDB takes nothing that late. */
const LEFT = "nearfar.chat-left";

/** A chat in the list. */
interface Row extends Pick<Chat, "id" | "changed"> {
  readonly title: string;
}

function rowOf(chat: Chat): Row {
  return { id: chat.id, changed: chat.changed, title: titleOf(chat) };
}

export class History {
  readonly #store = new ChatStore();
  readonly #list = element("chats", HTMLUListElement);
  readonly #state = element("chats-state", HTMLParagraphElement);
  /** The last write; writes follow one another, so that the last one wins. */
  #last: Promise<unknown> = Promise.resolve();
  readonly #deleted = new Set<string>();
  /**
   * The chats in order, without their messages: an answer is stored each second, and otherwise all other
   * chats would be read.
   */
  #rows: readonly Row[] | null = null;
  /** The contents of the list, to detect changes. */
  #shown = "";

  /**
   * `open` shows a chat, or with null a new one. `isBusy`: an answer is being written, so nothing may change.
   */
  constructor(
    private readonly open: (chat: Chat | null) => void,
    private readonly isBusy: () => boolean,
  ) {
    const all = (id: string, run: (chats: Chat[]) => void): void =>
      element(id, HTMLButtonElement).addEventListener("click", () => void this.#store.list().then(run));
    all("export-json", (chats) => download("chats.json", toJson(chats), "application/json"));
    all("export-markdown", (chats) => download("chats.md", toMarkdown(chats), "text/markdown"));
    element("delete-chats", HTMLButtonElement).addEventListener("click", () => void this.#deleteAll());
    // Other tabs may have stored chats meanwhile.
    document.addEventListener("visibilitychange", () => {
      if (document.visibilityState === "visible") void this.refresh();
    });
  }

  /** Returns the chat that this tab had open before its reload. */
  async restore(): Promise<Chat | null> {
    try {
      const left = JSON.parse(sessionStorage.getItem(LEFT) ?? "null") as Chat | null;
      if (left) {
        this.keep(left);
        return left;
      }
      const id = sessionStorage.getItem(OPEN);
      return id === null ? null : await this.#store.read(id);
    } catch {
      return null;
    } finally {
      await this.refresh();
    }
  }

  /** Stores a chat in its present state. */
  keep(chat: Chat): void {
    if (this.#deleted.has(chat.id)) return;
    const copy = structuredClone(chat);
    this.opened(chat.id);
    this.#forgetLeft();
    this.#last = this.#last
      .then(() => this.#store.write(copy))
      .then(
        () => this.#kept(copy),
        () => this.#tell("This browser keeps no chats here: they end with the page."),
      );
  }

  /** Stores a chat at once, for the page's next load in this tab. */
  keepForReload(chat: Chat): void {
    try {
      sessionStorage.setItem(LEFT, JSON.stringify(chat));
    } catch {
      // Storage is full or forbidden: the last stored version remains.
    }
  }

  /** Removes the chat of the last reload: a page restored from the browser's cache has newer contents. */
  #forgetLeft(): void {
    try {
      sessionStorage.removeItem(LEFT);
    } catch {
      // Forbidden storage has nothing to remove.
    }
  }

  /** Stores which chat this tab shows. */
  opened(id: string | null): void {
    try {
      if (id === null) sessionStorage.removeItem(OPEN);
      else sessionStorage.setItem(OPEN, id);
    } catch {
      // Storage is forbidden: a reload begins a new chat.
    }
  }

  async refresh(): Promise<void> {
    try {
      this.#show((await this.#store.list()).map(rowOf));
    } catch {
      this.#tell("This browser keeps no chats here: they end with the page.");
    }
  }

  async #kept(chat: Chat): Promise<void> {
    if (!this.#rows) return this.refresh();
    if (this.#deleted.has(chat.id)) return;
    const others = this.#rows.filter(({ id }) => id !== chat.id);
    this.#show([...others, rowOf(chat)].sort((a, b) => b.changed - a.changed));
  }

  #show(rows: readonly Row[]): void {
    this.#rows = rows;
    // An unchanged list keeps its focus.
    const shown = JSON.stringify([this.#current(), rows.map(({ id, title }) => [id, title])]);
    if (shown !== this.#shown) this.#showRows(rows);
    this.#shown = shown;
    this.#tell(rows.length === 0 ? "No chats yet." : "Kept in this browser only.");
    element("chats-tools", HTMLElement).hidden = rows.length === 0;
  }

  /** Shows the rows; the focus stays with its chat, or else at its place. */
  #showRows(chats: readonly Row[]): void {
    const rows = [...this.#list.children] as HTMLElement[];
    const at = rows.findIndex((row) => row.contains(document.activeElement));
    const button = at < 0 ? -1 : [...(rows[at]?.children ?? [])].indexOf(document.activeElement as Element);
    const id = rows[at]?.dataset.chat;
    const made = chats.map((chat) => this.#row(chat));
    this.#list.replaceChildren(...made);
    if (at < 0) return;
    const row = made.find(({ dataset }) => dataset.chat === id) ?? made[Math.min(at, made.length - 1)];
    const next = row?.children[button] ?? element("history", HTMLElement).querySelector("summary");
    if (next instanceof HTMLElement) next.focus();
  }

  #row(chat: Row): HTMLElement {
    const row = document.createElement("li");
    row.dataset.chat = chat.id;
    const open = button(chat.title, () => void this.#open(chat.id));
    const remove = button("×", () => void this.#delete(chat));
    remove.setAttribute("aria-label", `Delete “${chat.title}”`);
    open.className = "chat-title";
    open.title = chat.title;
    if (chat.id === this.#current()) open.setAttribute("aria-current", "true");
    row.append(open, remove);
    return row;
  }

  async #open(id: string): Promise<void> {
    if (this.isBusy()) return;
    // Export the present state: the row was made when the chat was shorter.
    const chat = await this.#store.read(id);
    if (!chat || this.isBusy()) return;
    this.opened(id);
    this.open(chat);
    await this.refresh();
  }

  async #delete(chat: Row): Promise<void> {
    if (this.isBusy() || !confirm(`Delete the chat “${chat.title}”?`)) return;
    this.#deleted.add(chat.id);
    await this.#store.delete(chat.id);
    // A new chat takes the focus, a list that got shorter keeps it.
    if (chat.id === this.#current()) this.#begin();
    await this.refresh();
    say("The chat is deleted");
  }

  async #deleteAll(): Promise<void> {
    if (this.isBusy() || !confirm("Delete all chats of this browser?")) return;
    for (const { id } of await this.#store.list()) this.#deleted.add(id);
    await this.#store.clear();
    this.#begin();
    await this.refresh();
    say("All chats are deleted");
  }

  #begin(): void {
    this.opened(null);
    this.open(null);
  }

  #current(): string | null {
    try {
      return sessionStorage.getItem(OPEN);
    } catch {
      return null;
    }
  }

  #tell(text: string): void {
    this.#state.textContent = text;
  }
}
