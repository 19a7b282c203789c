/** Where JSON that comes in pieces ends. */

const BRACKETS = /["{}[\]]/g;
const QUOTED = /(?:[^"\\]+|\\.)*/sy;

/** How deep in JSON a text is that comes in pieces. Brackets in strings are none. */
export class Nesting {
  #isQuoted = false;
  #isEscaped = false;

  constructor(private depth = 0) {}

  /** Where in this next piece the outermost bracket closes; null: it does not. */
  end(text: string): number | null {
    let at = 0;
    if (this.#isEscaped && text !== "") {
      at = 1;
      this.#isEscaped = false;
    }
    while (at < text.length) {
      if (this.#isQuoted) {
        at = this.#through(text, at);
        continue;
      }
      BRACKETS.lastIndex = at;
      const found = BRACKETS.exec(text);
      if (!found) return null;
      at = found.index + 1;
      if (found[0] === '"') this.#isQuoted = true;
      else {
        this.depth += found[0] === "{" || found[0] === "[" ? 1 : -1;
        if (this.depth === 0) return at;
      }
    }
    return null;
  }

  /** On to behind the string that the text is in, or to its end. */
  #through(text: string, from: number): number {
    QUOTED.lastIndex = from;
    const at = from + (QUOTED.exec(text)?.[0].length ?? 0);
    const rest = text.charAt(at);
    if (rest === '"') this.#isQuoted = false;
    // And nothing behind it yet.
    this.#isEscaped = rest === "\\";
    return at + rest.length;
  }
}
