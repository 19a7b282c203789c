/** From the token ids of one answer to its text, piece by piece. */

import type { ByteRules } from "./token-bytes.js";
import type { TextDelta, TextStream } from "./types.js";

/**
 * The token of an id, or undefined where the id adds nothing to the text (special, or outside the
 * vocabulary).
 */
export type VisibleToken = (id: number) => string | undefined;

/** Joins tokens into characters: nothing comes out before all bytes of a character are in. */
export class IncrementalDecoder {
  // ignoreBOM, since a U+FEFF in an answer is text like any other; by default the decoder would swallow the
  // first.
  readonly #decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  readonly #rules: ByteRules;
  #first: boolean;
  #toStrip: number;

  /** `begun`: the text has begun before the first token. */
  constructor(rules: ByteRules, begun: boolean) {
    this.#rules = rules;
    this.#first = !begun;
    this.#toStrip = begun ? 0 : rules.strip.count;
  }

  push(token: string): string {
    const bytes = this.#rules.bytes(token, this.#first);
    this.#first = false;
    return this.#stripped(this.#decoder.decode(bytes, { stream: true }));
  }

  /** What is left when no token follows: U+FFFD for the beginning of a character that never ended. */
  flush(): string {
    return this.#stripped(this.#decoder.decode());
  }

  #stripped(text: string): string {
    let start = 0;
    while (this.#toStrip > 0 && start < text.length) {
      if (text[start] === this.#rules.strip.char) {
        start++;
        this.#toStrip--;
      } else {
        this.#toStrip = 0;
      }
    }
    return text.slice(start);
  }
}

/**
 * Cuts a text at the first of the stop strings, which may arrive in pieces: a tail that could begin one is
 * held back.
 */
export class StopFinder {
  readonly #stops: readonly string[];
  #held = "";

  constructor(stops: readonly string[]) {
    this.#stops = stops.filter((stop) => stop.length > 0);
  }

  push(text: string): TextDelta {
    const buffer = this.#held + text;
    const found = this.#stops.map((stop) => buffer.indexOf(stop)).filter((index) => index >= 0);
    if (found.length > 0) {
      this.#held = "";
      return { text: buffer.slice(0, Math.min(...found)), stopped: true };
    }
    const kept = Math.max(0, ...this.#stops.map((stop) => overlap(buffer, stop)));
    this.#held = buffer.slice(buffer.length - kept);
    return { text: buffer.slice(0, buffer.length - kept), stopped: false };
  }

  flush(): string {
    const text = this.#held;
    this.#held = "";
    return text;
  }
}

/** The length of the longest proper prefix of `stop` that `text` ends with. */
function overlap(text: string, stop: string): number {
  for (let length = Math.min(stop.length - 1, text.length); length > 0; length--) {
    if (text.endsWith(stop.slice(0, length))) return length;
  }
  return 0;
}

export class AnswerStream implements TextStream {
  readonly #visible: VisibleToken;
  readonly #decoder: IncrementalDecoder;
  readonly #finder: StopFinder;
  #stopped = false;
  #length = 0;

  constructor(visible: VisibleToken, decoder: IncrementalDecoder, stop: readonly string[]) {
    this.#visible = visible;
    this.#decoder = decoder;
    this.#finder = new StopFinder(stop);
  }

  get length(): number {
    return this.#length;
  }

  push(tokenId: number): TextDelta {
    const token = this.#stopped ? undefined : this.#visible(tokenId);
    if (token === undefined) return { text: "", stopped: this.#stopped };
    const text = this.#decoder.push(token);
    this.#length += [...text].length;
    const delta = this.#finder.push(text);
    this.#stopped = delta.stopped;
    return delta;
  }

  flush(): string {
    if (this.#stopped) return "";
    const last = this.#finder.push(this.#decoder.flush());
    this.#stopped = true;
    return last.text + this.#finder.flush();
  }
}
