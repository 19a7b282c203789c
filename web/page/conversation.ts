import type { ChatMessage } from "../src/both/openai.js";
/** The conversation on the page and the messages behind it. Text goes in as text, never as HTML. */

import type { RouteInfo } from "../src/routing/index.js";
import { badge } from "./badge.js";
import { element } from "./dom.js";

/** One answer as it grows. */
export interface Answer {
  append(text: string): void;
  /** Says where it comes from, and of which model it is. */
  route(info: RouteInfo, model: string): void;
  /** Ends the answer; `note` says how, when that is not obvious. */
  end(note: string | null): void;
  /** Ends an answer that failed: neither it nor its question is part of what follows. */
  fail(): void;
}

export class Conversation {
  readonly #log = element("log", HTMLOListElement);
  readonly #scroller = element("scroller", HTMLElement);
  readonly #messages: ChatMessage[] = [];
  #id = crypto.randomUUID();

  /** Names the conversation for budgets and caches; it says nothing else. */
  get id(): string {
    return this.#id;
  }

  get messages(): readonly ChatMessage[] {
    return this.#messages;
  }

  clear(): void {
    this.#messages.length = 0;
    this.#id = crypto.randomUUID();
    this.#log.replaceChildren();
  }

  ask(content: string): void {
    this.#messages.push({ role: "user", content });
    this.#turn("user", "You").textContent = content;
    this.#scrollDown();
  }

  answer(name: string): Answer {
    // The latest answer is the one that links and tests look for.
    document.getElementById("answer")?.removeAttribute("id");
    const body = this.#turn("assistant", name);
    body.id = "answer";
    const text = document.createTextNode("");
    body.append(text);
    const turn = body.parentElement;
    const origin = badge();
    const who = turn?.querySelector(".who");
    who?.append(origin.node);
    turn?.setAttribute("aria-busy", "true");
    return {
      append: (more) => {
        const follow = this.#atBottom();
        text.appendData(more);
        if (follow) this.#scrollDown();
      },
      route: (info, model) => {
        origin.show(info);
        if (who?.firstChild && model !== "") who.firstChild.nodeValue = model;
      },
      end: (note) => {
        const follow = this.#atBottom();
        turn?.removeAttribute("aria-busy");
        this.#messages.push({ role: "assistant", content: text.data });
        if (note !== null && turn) appendTo(turn, "note", note);
        if (follow) this.#scrollDown();
      },
      fail: () => {
        turn?.removeAttribute("aria-busy");
        if (text.data === "") turn?.remove();
        this.#messages.pop();
      },
    };
  }

  #turn(role: "user" | "assistant", name: string): HTMLElement {
    const turn = document.createElement("li");
    turn.className = `turn ${role}`;
    appendTo(turn, "who", name);
    this.#log.append(turn);
    return appendTo(turn, "text", "");
  }

  /** Whoever scrolled up to read is not pulled down by new text. */
  #atBottom(): boolean {
    const { scrollHeight, scrollTop, clientHeight } = this.#scroller;
    return scrollHeight - scrollTop - clientHeight < 40;
  }

  #scrollDown(): void {
    this.#scroller.scrollTop = this.#scroller.scrollHeight;
  }
}

function appendTo(parent: HTMLElement, className: string, text: string): HTMLElement {
  const child = document.createElement("div");
  child.className = className;
  child.textContent = text;
  parent.append(child);
  return child;
}
