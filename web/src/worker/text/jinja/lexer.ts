/**
 * Splits a template into tokens as Jinja2's lexer does with the settings of transformers: trim_blocks, lstrip_blocks,
 * and no newline at the end of a template.
 */

import { BLANK, isBlank, stripped } from "./texts.js";

export type TokenKind =
  | "data"
  | "begin"
  | "end"
  | "name"
  | "string"
  | "integer"
  | "float"
  | "operator"
  | "eof";

/**
 * A token. `text` is the source text; for a string it is the string's value, for the begin and the end of a tag it is
 * "%" or "{", the kind of tag.
 */
export interface Token {
  readonly kind: TokenKind;
  readonly text: string;
  readonly line: number;
}

/** The template is invalid in Jinja too, or it needs a feature that this implementation lacks. */
export class TemplateError extends Error {}

const RAW = new RegExp(`\\{%([-+]?)${BLANK}*raw${BLANK}*(?:-%\\}${BLANK}*|%\\})`, "y");
const END_RAW = new RegExp(`\\{%([-+]?)${BLANK}*endraw${BLANK}*(?:\\+%\\}|-%\\}${BLANK}*|%\\}\\n?)`, "g");
const END_COMMENT = new RegExp(`\\+#\\}|-#\\}${BLANK}*|#\\}\\n?`, "g");
const END_BLOCK = new RegExp(`\\+%\\}|-%\\}${BLANK}*|%\\}\\n?`, "y");
const END_VARIABLE = new RegExp(`-\\}\\}${BLANK}*|\\}\\}`, "y");
const BLANKS = new RegExp(`${BLANK}+`, "y");
const FLOAT = /(?<!\.)(?:\d+_)*\d+(?:(?:\.(?:\d+_)*\d+)?e[+-]?(?:\d+_)*\d+|\.(?:\d+_)*\d+)/iy;
const INTEGER = /0b(?:_?[01])+|0o(?:_?[0-7])+|0x(?:_?[\da-f])+|[1-9](?:_?\d)*|0(?:_?0)*/iy;
const NAME = /[\p{L}\p{N}_]+/uy;
const STRING = /'(?:[^'\\]*(?:\\.[^'\\]*)*)'|"(?:[^"\\]*(?:\\.[^"\\]*)*)"/sy;
const OPERATOR = /\/\/|\*\*|==|!=|>=|<=|[-+/*%~[\](){}><=.:|,;]/y;
const CLOSERS: Readonly<Record<string, string>> = { "(": ")", "[": "]", "{": "}" };

export function tokenize(template: string): Token[] {
  return new Lexer(template).all();
}

class Lexer {
  readonly #source: string;
  readonly #tokens: Token[] = [];
  #at = 0;
  /** The last match ended with a line break, or nothing has been read. */
  #lineStarts = true;
  #line = 1;
  /** Line breaks are counted up to this position. */
  #counted = 0;

  constructor(template: string) {
    const lines = template.split(/\r\n|\r|\n/);
    if (lines.at(-1) === "") lines.pop();
    this.#source = lines.join("\n");
  }

  all(): Token[] {
    while (this.#at < this.#source.length) this.#data();
    this.#push("eof", "");
    return this.#tokens;
  }

  #push(kind: TokenKind, text: string): void {
    this.#tokens.push({ kind, text, line: this.#lineHere() });
  }

  #lineHere(): number {
    this.#line += this.#source.slice(this.#counted, this.#at).split("\n").length - 1;
    this.#counted = this.#at;
    return this.#line;
  }

  #fail(what: string): never {
    throw new TemplateError(`${what} in line ${this.#lineHere()}`);
  }

  /** Matches an expression at the current position, and moves behind the match. */
  #take(expression: RegExp): RegExpExecArray | null {
    expression.lastIndex = this.#at;
    const found = expression.exec(this.#source);
    if (found) {
      this.#at = expression.lastIndex;
      this.#lineStarts = found[0].endsWith("\n");
    }
    return found;
  }

  /** Reads the text up to the next tag, and that tag. */
  #data(): void {
    const from = this.#at;
    const found = /\{[{%#]/g;
    found.lastIndex = from;
    const tag = found.exec(this.#source)?.[0] ?? "";
    const end = tag ? found.lastIndex - 2 : this.#source.length;
    const text = this.#source.slice(from, end);
    this.#at = end;
    if (!tag) {
      this.#push("data", text);
      return;
    }
    const raw = tag === "{%" ? this.#takeKeepingLine(RAW) : null;
    const sign = raw?.[1] ?? this.#source[end + 2] ?? "";
    this.#pushData(text, sign, tag !== "{{");
    if (raw) {
      this.#raw();
      return;
    }
    this.#at = end + 2 + (sign === "-" || sign === "+" ? 1 : 0);
    this.#lineStarts = false;
    if (tag === "{#") {
      if (!this.#take(END_COMMENT)) this.#fail("a comment without an end");
      return;
    }
    this.#tag(tag === "{%");
  }

  #takeKeepingLine(expression: RegExp): RegExpExecArray | null {
    const before = this.#lineStarts;
    const found = this.#take(expression);
    if (found) this.#lineStarts = before;
    return found;
  }

  #pushData(text: string, sign: string, isBlock: boolean): void {
    let kept = text;
    if (sign === "-") kept = stripped(text, null, "end");
    else if (sign !== "+" && isBlock) {
      const line = text.lastIndexOf("\n") + 1;
      if ((line > 0 || this.#lineStarts) && isBlank(text.slice(line))) kept = text.slice(0, line);
    }
    if (kept) this.#push("data", kept);
  }

  #raw(): void {
    this.#lineStarts = this.#source[this.#at - 1] === "\n";
    const from = this.#at;
    const found = this.#take(END_RAW);
    if (!found) this.#fail("a raw block without an end");
    const lineStarts = this.#lineStarts;
    this.#lineStarts = this.#source[from - 1] === "\n";
    this.#pushData(this.#source.slice(from, found.index), found[1] ?? "", true);
    this.#lineStarts = lineStarts;
  }

  #tag(isBlock: boolean): void {
    const kind = isBlock ? "%" : "{";
    const end = isBlock ? END_BLOCK : END_VARIABLE;
    const open: string[] = [];
    this.#push("begin", kind);
    for (;;) {
      if (open.length === 0 && this.#take(end)) {
        this.#push("end", kind);
        return;
      }
      if (this.#take(BLANKS)) continue;
      const number = this.#take(FLOAT);
      if (number) this.#push("float", number[0].replaceAll("_", ""));
      else this.#other(open);
    }
  }

  #other(open: string[]): void {
    const integer = this.#take(INTEGER);
    const name = integer ? null : this.#take(NAME);
    const string = integer || name ? null : this.#take(STRING);
    if (integer) this.#push("integer", integer[0].replaceAll("_", ""));
    else if (name) this.#push("name", name[0]);
    else if (string) this.#push("string", unescaped(string[0].slice(1, -1)));
    else this.#operator(open);
  }

  #operator(open: string[]): void {
    const text = this.#take(OPERATOR)?.[0];
    if (!text) this.#fail(`unexpected ${JSON.stringify(this.#source[this.#at] ?? "end")}`);
    const closer = CLOSERS[text];
    if (closer) open.push(closer);
    else if (")]}".includes(text) && open.pop() !== text) this.#fail(`unexpected ${text}`);
    this.#push("operator", text);
  }
}

const ESCAPE = /\\(?:x([\da-fA-F]{2})|u([\da-fA-F]{4})|U([\da-fA-F]{8})|([0-7]{1,3})|(.))/gs;
const ESCAPED: Readonly<Record<string, string>> = {
  n: "\n",
  t: "\t",
  r: "\r",
  b: "\b",
  f: "\f",
  v: "\v",
  a: "\x07",
  "'": "'",
  '"': '"',
  "\\": "\\",
  "\n": "",
};

/** Resolves the escapes of a string as Python does: unknown escapes stay as they are. */
function unescaped(text: string): string {
  return text.replace(ESCAPE, (all, x, u, long, octal, other?: string) => {
    const hex: string | undefined = x ?? u ?? long;
    if (hex !== undefined) return String.fromCodePoint(Number.parseInt(hex, 16));
    if (octal !== undefined) return String.fromCodePoint(Number.parseInt(octal, 8));
    if (other === "x" || other === "u" || other === "U" || other === "N")
      throw new TemplateError(`the escape ${all} in a string is not read here`);
    return ESCAPED[other ?? ""] ?? all;
  });
}
