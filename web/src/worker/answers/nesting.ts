/** Finds the end of a JSON text that comes in pieces. */

const BRACKETS = /["{}[\]]/g;
const QUOTED = /(?:[^"\\]+|\\.)*/sy;

/** Counts the open brackets of a JSON text that comes in pieces; brackets in strings do not count. */
export class Nesting {
  #isQuoted = false;
  #isEscaped = false;

  constructor(private depth = 0) {}

  /** Where the outermost bracket closes in this piece, the next one of the text; null if the bracket stays open. */
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

  /** Where the string ends in which the text is at `from`, or the end of the text. */
  #through(text: string, from: number): number {
    QUOTED.lastIndex = from;
    const at = from + (QUOTED.exec(text)?.[0].length ?? 0);
    const rest = text.charAt(at);
    if (rest === '"') this.#isQuoted = false;
    // The next piece begins behind a backslash.
    this.#isEscaped = rest === "\\";
    return at + rest.length;
  }
}
