/**
 * Reads calls that do not keep to the model's own format: a JSON object with a tool's name and arguments, alone, in a
 * code fence, in a tag such as <tools>, or with doubled braces, as Qwen2.5-Coder's template shows a call. edge_runtime/tools/loose.py does the same (tests/vectors/tools tests
 * both).
 */

import { BLANKS } from "./calls.js";
import { matchAt } from "./values.js";

/** Names of the tags in which models put a call. */
const TAGS = [
  "tool_call",
  "tool_calls",
  "tools",
  "tool",
  "function_call",
  "function_calls",
  "functions",
  "function",
  "call",
  "json",
  "action",
];
/** The keys under which such a call has its arguments. */
export const WORDS = ["arguments", "parameters"];
/** Keys with a string or a number as value that models write before the name, as in OpenAI's records of calls. */
const LEADING = ["type", "id", "call_id", "tool_call_id", "index"].map((key) => `"${key}"`);
const SCALAR = /"[^"\\\n]{0,64}"|-?[0-9]{1,20}(?=[^0-9])|true|false|null/y;
const BEGUN = /^(?:"[^"\\\n]{0,64}|-?[0-9]{0,20}|[a-z]{0,4})$/;
const FENCE = /^```[\w-]{0,20}[ \t]*\r?(\n)?/;
const LINE = /(?:^|\n)[ \t]*(?=[`<{[])/g;

/** The text is too short to decide; more text has to come. */
export const UNSURE = "unsure";
class More extends Error {}
class Other extends Error {}

/**
 * The beginning of a call, up to its arguments. `end` is where the arguments begin. `closer` is the text that ends
 * the surrounding fence, tag or braces, "" without one. `isListed` says that the call stands in a list.
 */
export interface Opening {
  readonly name: string;
  readonly end: number;
  readonly closer: string;
  readonly isListed: boolean;
}

/** The places at the beginnings of lines where a call may begin. `fresh` says that the text itself begins a line. */
export function candidates(text: string, fresh: boolean): number[] {
  return [...text.matchAll(LINE)]
    .filter(({ index }) => index > 0 || fresh || text.startsWith("\n"))
    .map(({ 0: found, index }) => index + found.length);
}

/** The beginning of the call with which a text begins; null if the text begins with no call. */
export function opening(text: string, names: Iterable<string>): Opening | typeof UNSURE | null {
  const scan = new Scan(text, names);
  return settled(null, () => {
    const closer = scan.wrapper();
    scan.blanks();
    const isListed = scan.maybe("[");
    return { name: scan.head(), end: scan.at, closer, isListed };
  });
}

/**
 * Reads what stands behind a call: the next call in the same fence, tag or list, or else the length of the text that
 * ends the list and the fence or tag.
 */
export function following(
  text: string,
  names: Iterable<string>,
  { closer, isListed: wasListed }: Opening,
): Opening | number | typeof UNSURE {
  const scan = new Scan(text, names);
  let isListed = wasListed;
  let end = 0;
  const read = (): Opening | number => {
    scan.blanks();
    const isComma = isListed || closer !== "" ? scan.maybe(",") : false;
    scan.blanks();
    if (isListed && !isComma && scan.maybe("]")) {
      isListed = false;
      end = scan.at;
      scan.blanks();
    }
    if (closer && !isComma && scan.maybe(closer)) {
      // A model that doubles braces may close more than it has opened.
      while (closer === "}" && scan.maybe("}"));
      return scan.at;
    }
    if (!(isComma || closer)) return end;
    return { name: scan.head(), end: scan.at, closer, isListed };
  };
  return settled(null, read) ?? end;
}

function settled<T, U>(other: U, read: () => T): T | U | typeof UNSURE {
  try {
    return read();
  } catch (error) {
    if (error instanceof More) return UNSURE;
    if (error instanceof Other) return other;
    throw error;
  }
}

/** Reads a text from left to right; throws More at the end of the text and Other where the text is not a call. */
class Scan {
  at = 0;

  constructor(
    private readonly text: string,
    private readonly names: Iterable<string>,
  ) {}

  blanks(): void {
    while (this.at < this.text.length && BLANKS.includes(this.text.charAt(this.at))) this.at++;
  }

  /** Skips the mark if it stands here. Throws More if the text ends within the mark. */
  maybe(mark: string): boolean {
    if (this.text.startsWith(mark, this.at)) {
      this.at += mark.length;
      return true;
    }
    if (mark.startsWith(this.text.slice(this.at))) throw new More();
    return false;
  }

  /** Skips and returns the one of `marks` that stands here; no mark may begin another one. */
  #oneOf(marks: readonly string[]): string {
    const found = marks.find((mark) => this.text.startsWith(mark, this.at));
    if (found !== undefined) {
      this.at += found.length;
      return found;
    }
    const rest = this.text.slice(this.at);
    throw marks.some((mark) => mark.startsWith(rest)) ? new More() : new Other();
  }

  /**
   * Skips the fence, the tag or the first of doubled braces with which the text begins, and returns the text that ends
   * it; "" without any of them.
   */
  wrapper(): string {
    if (this.maybe("{{")) {
      this.at -= 1;
      return "}";
    }
    if (this.text.startsWith("<")) return `</${this.#oneOf(TAGS.map((name) => `<${name}>`)).slice(1)}`;
    if (!this.maybe("```")) return "";
    const [fence = "", line] = FENCE.exec(this.text) ?? [];
    this.at = fence.length;
    if (line === undefined && this.at === this.text.length) throw new More();
    return "```";
  }

  /** Reads a call up to its arguments and returns the name of its tool. */
  head(): string {
    this.#next("{");
    while (this.#next('"name"', ...LEADING) !== '"name"') {
      this.#next(":");
      this.#scalar();
      this.#next(",");
    }
    this.#next(":");
    const named = new Map([...this.names].map((name) => [JSON.stringify(name), name]));
    const name = named.get(this.#next(...named.keys())) ?? "";
    this.#next(",");
    this.#next(...WORDS.map((word) => `"${word}"`));
    this.#next(":");
    this.blanks();
    if (this.at === this.text.length) throw new More();
    if (this.text.charAt(this.at) !== "{") throw new Other();
    return name;
  }

  #scalar(): void {
    this.blanks();
    const found = matchAt(SCALAR, this.text, this.at);
    if (found === null) throw BEGUN.test(this.text.slice(this.at)) ? new More() : new Other();
    this.at += found.length;
  }

  #next(...marks: string[]): string {
    this.blanks();
    return this.#oneOf(marks);
  }
}
