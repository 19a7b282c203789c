/** Reads the arguments of a call, written as JSON or as the model's Spelling says. */

import type { Spelling } from "./format.js";

export type Values = Record<string, unknown>;

/** The text does not match its format. */
export class Wrong extends Error {}

const NUMBER = /-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?/y;
const LETTERS = /[A-Za-z]+/y;
const BLANKS = /[ \t\r\n]*/y;
const ESCAPES: Readonly<Record<string, string>> = { n: "\n", t: "\t", r: "\r", b: "\b", f: "\f" };
const DEPTH = 64;

export function jsonOf(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Wrong(String(error));
  }
}

export function isObject(value: unknown): value is Values {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** A JSON value as the model wrote it, because a JavaScript number would lose digits of a long number. */
class Verbatim {
  constructor(readonly json: string) {}
}

/** Writes JSON as Python's json.dumps does, because models are trained on such text. */
export function written(value: unknown): string {
  if (value instanceof Verbatim) return value.json;
  if (Array.isArray(value)) return `[${value.map(written).join(", ")}]`;
  if (!isObject(value)) return JSON.stringify(value) ?? "null";
  const members = Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${written(one)}`);
  return `{${members.join(", ")}}`;
}

/** The text that a sticky regular expression matches at a place; null without a match. */
export function matchAt(expression: RegExp, text: string, at: number): string | null {
  expression.lastIndex = at;
  return expression.exec(text)?.[0] ?? null;
}

/** A position in a text that is read from left to right. */
export class Cursor {
  constructor(
    readonly text: string,
    public at: number,
  ) {}

  blanks(): void {
    this.at += matchAt(BLANKS, this.text, this.at)?.length ?? 0;
  }

  /** Whether the mark stands here, behind white space. Throws Wrong at the end of the text. */
  follows(mark: string): boolean {
    this.blanks();
    if (this.text.startsWith(mark, this.at)) return true;
    if (this.at >= this.text.length) throw new Wrong(`${mark} is missing`);
    return false;
  }

  take(mark: string): void {
    this.blanks();
    if (!this.text.startsWith(mark, this.at)) throw new Wrong(`${mark} is missing`);
    this.at += mark.length;
  }

  until(mark: string): string {
    const end = this.text.indexOf(mark, this.at);
    if (end < 0 || mark === "") throw new Wrong(`${mark} is missing`);
    const text = this.text.slice(this.at, end);
    this.at = end + mark.length;
    return text;
  }
}

/**
 * Reads arguments that are not JSON. `schema` is the schema of the tool, where the tool is known: it says which
 * unquoted values are strings.
 */
export class SpelledReader {
  readonly #properties: Values;

  constructor(
    private readonly spelling: Spelling,
    private readonly cursor: Cursor,
    schema: unknown,
  ) {
    const { properties } = isObject(schema) ? schema : {};
    this.#properties = isObject(properties) ? properties : {};
  }

  arguments(): Values {
    const { spelling: s, cursor } = this;
    cursor.take(s.begin);
    const made: [string, unknown][] = [];
    while (!cursor.follows(s.end)) {
      if (made.length > 0 && s.separator) cursor.take(s.separator.trim());
      cursor.take(s.before_name);
      const name = cursor.until(s.after_name.trimEnd());
      if (!name) throw new Wrong("an argument without a name");
      made.push([name, s.raw ? this.#raw(name) : this.#value(0)]);
      if (!s.raw) cursor.take(s.after_value.trim());
    }
    cursor.take(s.end);
    return Object.fromEntries(made);
  }

  /** An unquoted value: the text up to the mark behind it, without one line break at each end. */
  #raw(name: string): unknown {
    const text = this.cursor.until(this.spelling.after_value.trim()).replace(/^\n/, "").replace(/\n$/, "");
    const schema = Object.hasOwn(this.#properties, name) ? this.#properties[name] : undefined;
    const { type } = isObject(schema) ? schema : {};
    const kinds = type === undefined ? null : [type].flat();
    if (kinds?.length === 1 && kinds[0] === "string") return text;
    try {
      jsonOf(text);
      return new Verbatim(text.trim());
    } catch (error) {
      if (kinds && !kinds.includes("string")) throw error;
      return text;
    }
  }

  #value(depth: number): unknown {
    if (depth > DEPTH) throw new Wrong("nested too deeply");
    const { cursor } = this;
    cursor.blanks();
    const [open, close] = this.spelling.quotes;
    if (open && close && cursor.text.startsWith(open, cursor.at)) {
      cursor.at += open.length;
      return cursor.until(close);
    }
    const char = cursor.text[cursor.at];
    if (char === '"' || char === "'") return this.#string(char);
    if (char === "[") return this.#list(depth);
    return char === "{" ? this.#object(depth) : this.#word();
  }

  #list(depth: number): unknown[] {
    const { cursor } = this;
    cursor.at++;
    const made: unknown[] = [];
    while (!cursor.follows("]")) {
      if (made.length > 0) cursor.take(",");
      made.push(this.#value(depth + 1));
    }
    cursor.take("]");
    return made;
  }

  #object(depth: number): Values {
    const { cursor } = this;
    cursor.at++;
    const made: [string, unknown][] = [];
    while (!cursor.follows("}")) {
      if (made.length > 0) {
        cursor.take(",");
        cursor.blanks();
      }
      const name = this.#isQuoted() ? String(this.#value(depth + 1)) : null;
      if (name !== null) cursor.take(":");
      made.push([name ?? cursor.until(":"), this.#value(depth + 1)]);
    }
    cursor.take("}");
    return Object.fromEntries(made);
  }

  #isQuoted(): boolean {
    const { text, at } = this.cursor;
    const [open] = this.spelling.quotes;
    return text[at] === '"' || text[at] === "'" || (!!open && text.startsWith(open, at));
  }

  #string(quote: string): string {
    const { cursor } = this;
    cursor.at++;
    for (let made = ""; ; ) {
      const char = cursor.text[cursor.at++];
      if (char === undefined) throw new Wrong("a string without an end");
      if (char === quote) return made;
      made += char === "\\" ? this.#escaped() : char;
    }
  }

  #escaped(): string {
    const { cursor } = this;
    const char = cursor.text[cursor.at++] ?? "";
    if (char !== "u") return ESCAPES[char] ?? char;
    const digits = cursor.text.slice(cursor.at, cursor.at + 4);
    cursor.at += 4;
    if (!/^[0-9a-fA-F]{4}$/.test(digits)) throw new Wrong("an escape that is none");
    return String.fromCharCode(Number.parseInt(digits, 16));
  }

  #word(): unknown {
    const { cursor } = this;
    const [yes, no, nothing] = this.spelling.words;
    const found = matchAt(LETTERS, cursor.text, cursor.at);
    const known = new Map<string | null | undefined, unknown>([
      [yes, true],
      [no, false],
      [nothing, null],
      ["true", true],
      ["false", false],
      ["null", null],
    ]);
    if (found && known.has(found)) {
      cursor.at += found.length;
      return known.get(found);
    }
    const number = matchAt(NUMBER, cursor.text, cursor.at);
    if (!number) throw new Wrong("neither a string nor a number");
    cursor.at += number.length;
    return new Verbatim(number);
  }
}
