/** Turns the token ids of one answer into text, piece by piece. */

import type { ByteRules } from "./token-bytes.js";
import type { TextDelta, TextStream } from "./types.js";

/**
 * The token of an id, or undefined where the id adds nothing to the text (special, or outside the
 * vocabulary).
 */
export type VisibleToken = (id: number) => string | undefined;

/** Joins tokens into characters. A character comes out when all its bytes have come in. */
export class IncrementalDecoder {
  // With ignoreBOM the decoder keeps a U+FEFF at the beginning of an answer, which it would drop by default.
  readonly #decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  readonly #rules: ByteRules;
  readonly #after: readonly TextStep[];
  #first: boolean;

  /** `begun` says that text stands before the first token. */
  constructor(rules: ByteRules, begun: boolean) {
    this.#rules = rules;
    this.#first = !begun;
    this.#after = rules.after
      .filter(({ kind }) => kind === "replace" || !begun)
      .map((rule) =>
        rule.kind === "strip" ? new Stripping(rule.char, rule.count) : new Replacing(rule.part, rule.by),
      );
  }

  push(token: string): string {
    const bytes = this.#rules.bytes(token, this.#first);
    this.#first = false;
    const text = this.#decoder.decode(bytes, { stream: true });
    return this.#after.reduce((made, step) => step.push(made), text);
  }

  /** Ends the text: an incomplete character becomes U+FFFD. */
  flush(): string {
    return this.#after.reduce((made, step) => step.push(made) + step.flush(), this.#decoder.decode());
  }
}

/** A rule for a whole text, applied while the text comes in pieces. */
interface TextStep {
  push(text: string): string;
  flush(): string;
}

class Stripping implements TextStep {
  constructor(
    private readonly char: string,
    private left: number,
  ) {}

  push(text: string): string {
    let start = 0;
    while (this.left > 0 && start < text.length) {
      if (text[start] === this.char) {
        start++;
        this.left--;
      } else {
        this.left = 0;
      }
    }
    return text.slice(start);
  }

  flush(): string {
    return "";
  }
}

/** Replaces a part of the text, and holds back text that may be the beginning of that part. */
class Replacing implements TextStep {
  #held = "";

  constructor(
    private readonly part: string,
    private readonly by: string,
  ) {}

  push(text: string): string {
    const parts = (this.#held + text).split(this.part);
    const last = parts.pop() ?? "";
    const kept = overlap(last, this.part);
    this.#held = last.slice(last.length - kept);
    return [...parts, last.slice(0, last.length - kept)].join(this.by);
  }

  flush(): string {
    const text = this.#held;
    this.#held = "";
    return text;
  }
}

/**
 * Cuts a text at the first stop string. A stop string may come in pieces, so an end of the text that may begin one is
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

/** The length of the longest proper prefix of `stop` with which `text` ends. */
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
