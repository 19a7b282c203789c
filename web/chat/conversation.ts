/** The open chat: its turns on the page, and the part of it that the browser stores. */

import type { ChatMessage } from "../src/protocol/openai.js";
import type { RouteInfo } from "../src/routing/index.js";
import { type Chat, hasBegun, messagesOf, newChat, type Turn, titleOf } from "./chats.js";
import { button, copyButton } from "./copy.js";
import { element } from "./dom.js";
import { Follow } from "./follow.js";
import type { Call } from "./tools.js";
import { TurnView } from "./turn-view.js";

/** One answer as it grows. */
export interface AnswerView {
  append(text: string): void;
  /** Shows that the model called tools and got their results. */
  called(calls: readonly Call[]): void;
  /** Shows where the answer comes from and which model it is; null where there is only one place. */
  route(info: RouteInfo | null, model: string): void;
  /** Text for screen readers, once the answer is complete. */
  readonly spoken: string;
  /** Ends the answer; `note` says how, when that is not obvious. */
  end(note: string | null): void;
  /** Ends an answer that failed: neither it nor its question is sent in later requests. */
  fail(): void;
}

export interface Events {
  /** Called when the chat should be stored. */
  changed(chat: Chat): void;
  /** Called when a person wants the last question answered, for the first time or again. */
  asked(): void;
  /** Called when a person asks while an answer is written, which nothing may change. */
  refused(): void;
}

export class Conversation {
  readonly #log = element("log", HTMLElement);
  readonly #follow = new Follow(element("scroller", HTMLElement), this.#log);
  #chat = newChat();
  #views: TurnView[] = [];

  constructor(private readonly events: Events) {}

  /** An id of the conversation, for budgets and caches. */
  get id(): string {
    return this.#chat.id;
  }

  /** The messages for the model. With `calls` false, answers come without the calls before them. */
  messages(calls: boolean): readonly ChatMessage[] {
    return messagesOf(this.#chat, calls);
  }

  get isEmpty(): boolean {
    return this.#views.length === 0;
  }

  /** Whether some of the chat continues a plain prompt, which no chat template counts. */
  get isPlain(): boolean {
    return this.#chat.turns.some(({ plain }) => plain === true);
  }

  /** Scrolls by `pages`; a negative number scrolls up. */
  page(pages: number): void {
    this.#follow.page(pages);
  }

  clear(): void {
    this.open(newChat());
  }

  open(chat: Chat): void {
    this.#chat = chat;
    this.#views = [];
    this.#log.replaceChildren();
    for (const turn of chat.turns) this.#show(turn);
    this.#markLast();
    this.showActions();
    this.#follow.toEnd();
  }

  ask(content: string): void {
    this.#add({ role: "user", content });
    this.#follow.toEnd();
  }

  /** Adds an answer. `kind`: the kind of its text, where that is not markdown. */
  answer(name: string, kind: Pick<Turn, "plain" | "json">): AnswerView {
    const turn: Turn = { role: "assistant", content: "", name, ...kind };
    // The note stands until the answer is complete, so that a reload shows it as interrupted.
    turn.note = "Interrupted";
    const view = this.#add(turn);
    delete turn.note;
    view.show();
    view.isBusy = true;
    this.#markLast();
    for (const each of this.#views) each.actions = [];
    return {
      get spoken() {
        return view.spoken;
      },
      append: (more) => {
        turn.content += more;
        view.showSoon();
      },
      called: (calls) => {
        turn.calls = [...(turn.calls ?? []), calls];
        view.show();
      },
      route: (info, model) => {
        if (model !== "") turn.name = model;
        if (info) turn.info = info;
        view.show();
      },
      end: (note) => this.#end(view, note === null ? {} : { note }),
      fail: () => this.#end(view, { failed: true, ...(hasBegun(turn) && { note: "Broken off" }) }),
    };
  }

  /** The chat with an answer that is still being written, for a reload of the page; else null. */
  get partial(): Chat | null {
    const last = this.#views.at(-1);
    if (!last?.node.hasAttribute("aria-busy")) return null;
    const turns = this.#chat.turns.map((turn) =>
      turn === last.turn ? { ...turn, note: "Interrupted" } : turn,
    );
    return { ...this.#chat, turns };
  }

  /** Shows the actions of each turn; none while an answer is written. */
  showActions(): void {
    this.#views.forEach((view, at) => {
      const { turn } = view;
      const isLast = at === this.#views.length - 1;
      const again = button("Answer again", () => {
        // The question is all that stays of this turn.
        this.#cut(turn.role === "user" ? at + 1 : at);
        this.events.asked();
      });
      if (turn.role === "user") {
        const edit = button("Edit", () => view.edit((text) => this.#askAnew(at, text)));
        view.actions = isLast ? [edit, again] : [edit];
        return;
      }
      const copy = copyButton("Copy", () => turn.content);
      const canRepeat = isLast && this.#views[at - 1]?.turn.role === "user";
      view.actions = canRepeat && turn.plain !== true ? [copy, again] : [copy];
    });
  }

  /** Asks again from a message on. Returns whether it did: the form may have been open before this answer began. */
  #askAnew(at: number, text: string): boolean {
    if (this.#views.some(({ node }) => node.hasAttribute("aria-busy"))) {
      this.events.refused();
      return false;
    }
    this.#cut(at);
    this.ask(text);
    this.events.asked();
    return true;
  }

  #end(view: TurnView, how: Partial<Turn>): void {
    Object.assign(view.turn, how);
    view.isBusy = false;
    // An answer that failed before its first word leaves its question, which can be asked again.
    if (view.turn.failed && !hasBegun(view.turn)) this.#cut(this.#views.indexOf(view));
    else view.show();
    this.#save();
    this.showActions();
  }

  #cut(at: number): void {
    for (const { node } of this.#views.splice(at)) node.remove();
    this.#chat.turns.splice(at);
  }

  #add(turn: Turn): TurnView {
    this.#chat.turns.push(turn);
    const view = this.#show(turn);
    this.#save();
    return view;
  }

  #show(turn: Turn): TurnView {
    const view = new TurnView(turn);
    this.#views.push(view);
    this.#log.append(view.node);
    return view;
  }

  #save(): void {
    this.#chat.title = titleOf(this.#chat);
    this.#chat.changed = Date.now();
    this.events.changed(this.#chat);
  }

  /** Marks the latest answer, which links and tests look for. */
  #markLast(): void {
    document.getElementById("answer")?.removeAttribute("id");
    const last = this.#views.findLast(({ turn }) => turn.role === "assistant");
    if (last) last.body.id = "answer";
  }
}
