/**
 * What waits until it can be answered, since the model loads or writes another answer. A message stays in its
 * box meanwhile, where a person can go on writing it.
 */

import { element } from "./dom.js";

/** The message in the box, or the chat's last question. */
export type What = "message" | "question";

/** What a person reads, by what waits and what for. */
const NOTES = {
  message: {
    loading:
      "The model is still loading. Your message is sent when the model is ready. Stop keeps the message here.",
    answering:
      "Your message is sent when this answer is complete. Stop ends the answer and keeps the message here.",
  },
  question: {
    loading:
      "The model is still loading. Your question is answered when the model is ready. Stop leaves it open.",
    answering:
      "Your question is answered when this answer is complete. Stop ends the answer and leaves it open.",
  },
} as const;

export class Waiting {
  readonly #note = element("waiting", HTMLParagraphElement);
  #what: What | null = null;

  /** What waits; null if nothing does. */
  get what(): What | null {
    return this.#what;
  }

  begin(what: What, waitsFor: keyof (typeof NOTES)[What]): void {
    this.#what = what;
    this.tell(NOTES[what][waitsFor]);
  }

  /** Nothing waits any more. Returns what did. */
  end(): What | null {
    const what = this.#what;
    this.#what = null;
    this.tell("");
    return what;
  }

  /** Shows why nothing is sent; "" shows nothing. Screen readers read it out. */
  tell(text: string): void {
    this.#note.textContent = text;
    this.#note.hidden = text === "";
  }
}
