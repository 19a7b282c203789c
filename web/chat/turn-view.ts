/** One message on the page: the speaker, its text, how it ended, and its actions. */

import type { RouteInfo } from "../src/routing/index.js";
import { badge } from "./badge.js";
import { showCalls } from "./call-view.js";
import { hasBegun, type Turn } from "./chats.js";
import { button } from "./copy.js";
import { Markdown } from "./markdown.js";

const FENCE = "~~~~~~";
const BLOCKS = "p, li, pre, .code-head, h1, h2, h3, h4, h5, h6, th, td";

export class TurnView {
  readonly node = document.createElement("li");
  readonly body = part("text");
  readonly #who = part("who");
  readonly #calls = part("calls");
  readonly #note = part("note");
  readonly #actions = part("actions");
  readonly #markdown: Markdown | null;
  /** Shown only where the answer could have come from the cloud. */
  #badge: ReturnType<typeof badge> | null = null;
  #frame: number | null = null;

  constructor(readonly turn: Turn) {
    this.node.className = `turn ${turn.role}`;
    this.#who.append(turn.role === "user" ? "You" : (turn.name ?? ""));
    this.node.append(this.#who, this.#calls, this.body, this.#note, this.#actions);
    // A person's text is shown as it is.
    const isMarkdown = turn.role === "assistant" && turn.plain !== true;
    this.#markdown = isMarkdown ? new Markdown(this.body) : null;
    this.body.classList.toggle("markdown", isMarkdown);
    this.show();
  }

  /** Shows the whole turn in its present state. */
  show(): void {
    const { note, info, name } = this.turn;
    this.showText();
    showCalls(this.#calls, this.turn.calls ?? []);
    this.#note.textContent = note ?? "";
    this.#note.hidden = note === undefined;
    if (name !== undefined && this.#who.firstChild) this.#who.firstChild.nodeValue = name;
    if (info) this.#showRoute(info);
    this.node.hidden = this.turn.failed === true && !hasBegun(this.turn);
  }

  #showRoute(info: RouteInfo): void {
    if (!this.#badge) {
      this.#badge = badge();
      this.#who.append(this.#badge.node);
    }
    this.#badge.show(info);
  }

  /** Shows the text at the next frame: tokens may come faster than frames. */
  showSoon(): void {
    this.#frame ??= requestAnimationFrame(() => {
      this.#frame = null;
      this.showText();
    });
  }

  showText(): void {
    if (this.#frame !== null) cancelAnimationFrame(this.#frame);
    this.#frame = null;
    const { content, json } = this.turn;
    if (this.#markdown) {
      // A fence that JSON cannot close.
      this.#markdown.show(json && content !== "" ? `${FENCE}json\n${content}\n${FENCE}` : content);
      return;
    }
    const { firstChild } = this.body;
    // Appending to a text node keeps the person's selection.
    if (firstChild instanceof Text && content.startsWith(firstChild.data))
      firstChild.appendData(content.slice(firstChild.length));
    else this.body.replaceChildren(document.createTextNode(content));
  }

  /** The turn's text for reading out: a line for each block, without the buttons of code. */
  get spoken(): string {
    const copy = this.body.cloneNode(true) as HTMLElement;
    for (const each of copy.querySelectorAll("button")) each.remove();
    for (const each of copy.querySelectorAll(BLOCKS)) each.append("\n");
    return copy.textContent.trim();
  }

  set isBusy(busy: boolean) {
    if (busy) this.node.setAttribute("aria-busy", "true");
    else this.node.removeAttribute("aria-busy");
  }

  set actions(buttons: readonly HTMLButtonElement[]) {
    this.#actions.replaceChildren(...buttons);
  }

  /** Lets a person edit the message; `send` takes the new text, and returns whether it could. */
  edit(send: (text: string) => boolean): void {
    const form = document.createElement("form");
    const field = document.createElement("textarea");
    const save = button("Ask again", () => form.requestSubmit());
    const close = (): void => {
      form.replaceWith(this.body);
      this.#actions.hidden = false;
      // Restores the keyboard focus.
      this.#actions.querySelector("button")?.focus();
    };
    form.className = "edit";
    field.value = this.turn.content;
    field.rows = 3;
    field.setAttribute("aria-label", "Edit your message");
    form.append(field, save, button("Cancel", close));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim() !== "" && send(field.value)) close();
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        // Escape closes only this form, and stops no answer.
        event.stopPropagation();
        close();
      }
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      form.requestSubmit();
    });
    this.body.replaceWith(form);
    this.#actions.hidden = true;
    field.focus();
  }
}

function part(className: string): HTMLElement {
  const node = document.createElement("div");
  node.className = className;
  return node;
}
