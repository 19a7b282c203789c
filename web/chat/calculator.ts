/** Arithmetic as people write it: + − × ÷ and powers, brackets, decimals. */

/** Deepest nesting of brackets that is read. */
const DEEPEST = 50;

/** Computes the value of an expression. Throws an Error that names what cannot be read, and where. */
export function calculate(expression: string): number {
  const parser = new Parser(expression);
  const value = parser.sum();
  parser.end();
  if (!Number.isFinite(value)) throw new Error(`${expression} has no value that is a number`);
  return value;
}

class Parser {
  #at = 0;
  #depth = 0;

  constructor(private readonly text: string) {}

  sum(): number {
    let value = this.#product();
    for (;;) {
      if (this.#takes("+")) value += this.#product();
      else if (this.#takes("-", "−")) value -= this.#product();
      else return value;
    }
  }

  end(): void {
    this.#skipBlanks();
    if (this.#at < this.text.length) throw this.#unexpected();
  }

  #product(): number {
    let value = this.#signed();
    for (;;) {
      // Powers are written ** too.
      if (!this.text.startsWith("**", this.#skipBlanks()) && this.#takes("*", "×", "·"))
        value *= this.#signed();
      else if (this.#takes("/", "÷")) value /= this.#signed();
      else return value;
    }
  }

  /** Reads a sign; a power binds more tightly: -2^2 is -4. */
  #signed(): number {
    if (this.#takes("-", "−")) return -this.#inner(() => this.#signed());
    const base = this.#atom();
    return this.#takes("**", "^") ? base ** this.#inner(() => this.#signed()) : base;
  }

  #atom(): number {
    if (this.#takes("(")) {
      const value = this.#inner(() => this.sum());
      if (!this.#takes(")")) throw this.#unexpected();
      return value;
    }
    const at = this.#skipBlanks();
    const [number] = /^(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?/i.exec(this.text.slice(at)) ?? [];
    if (number === undefined) throw this.#unexpected();
    this.#at += number.length;
    return Number(number);
  }

  #inner(read: () => number): number {
    if (++this.#depth > DEEPEST) throw new Error(`brackets and signs are more than ${DEEPEST} deep`);
    const value = read();
    this.#depth--;
    return value;
  }

  #takes(...signs: readonly string[]): boolean {
    const at = this.#skipBlanks();
    const found = signs.find((sign) => this.text.startsWith(sign, at));
    if (found !== undefined) this.#at += found.length;
    return found !== undefined;
  }

  #skipBlanks(): number {
    while (/\s/.test(this.text[this.#at] ?? "")) this.#at++;
    return this.#at;
  }

  #unexpected(): Error {
    const found = this.text[this.#at];
    return new Error(
      `${this.text}: ${found === undefined ? "it breaks off" : `“${found}” at place ${this.#at + 1}`}, where a ` +
        "sum goes on otherwise: numbers, + - * / ^ and brackets are read",
    );
  }
}
