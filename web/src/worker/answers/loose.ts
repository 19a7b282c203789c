/**
 * Calls as models write them that do not keep to their own format: an object of JSON alone, between the lines of
 * a code fence, or in a tag such as <tools>, with the name of a tool and its arguments
 * (edge_runtime/tools/loose.py; tests/vectors/tools holds it).
 */

import { BLANKS } from "./calls.js";
import { matchAt } from "./values.js";

/** Names of the tags that models put around a call. */
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
/** The keys that arguments stand under. */
export const WORDS = ["arguments", "parameters"];
/** Keys of a text or a number that models put before the name, as OpenAI's records of calls have them. */
const LEADING = ["type", "id", "call_id", "tool_call_id", "index"].map((key) => `"${key}"`);
const SCALAR = /"[^"\\\n]{0,64}"|-?[0-9]{1,20}(?=[^0-9])|true|false|null/y;
const BEGUN = /^(?:"[^"\\\n]{0,64}|-?[0-9]{0,20}|[a-z]{0,4})$/;
const FENCE = /^```[\w-]{0,20}[ \t]*\r?(\n)?/;
const LINE = /(?:^|\n)[ \t]*(?=[`<{[])/g;

/** More text has to come before anything can be said. */
export const UNSURE = "unsure";
class More extends Error {}
class Other extends Error {}

/**
 * Where the arguments of a call begin. `end`: behind what stands before them. `closer`: what ends the fence or
 * the tag around it, "" where there is none; `isListed`: it stands in a list.
 */
export interface Opening {
  readonly name: string;
  readonly end: number;
  readonly closer: string;
  readonly isListed: boolean;
}

/** Where calls may begin: at the beginning of a line. `fresh`: the text begins one. */
export function candidates(text: string, fresh: boolean): number[] {
  return [...text.matchAll(LINE)]
    .filter(({ index }) => index > 0 || fresh || text.startsWith("\n"))
    .map(({ 0: found, index }) => index + found.length);
}

/** The call with which a text begins; null: there is none. */
export function opening(text: string, names: Iterable<string>): Opening | typeof UNSURE | null {
  const scan = new Scan(text, names);
  return settled(null, () => {
    const closer = scan.wrapper();
    scan.blanks();
    const isListed = scan.maybe("[");
    return { name: scan.head(), end: scan.at, closer, isListed };
  });
}

/** What stands behind a call: the next one in the same fence, tag or list; or how long what ends these is. */
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
    if (closer && !isComma && scan.maybe(closer)) return scan.at;
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

/** Reads a text from its beginning, as far as it goes. */
class Scan {
  at = 0;

  constructor(
    private readonly text: string,
    private readonly names: Iterable<string>,
  ) {}

  blanks(): void {
    while (this.at < this.text.length && BLANKS.includes(this.text.charAt(this.at))) this.at++;
  }

  /** Whether the mark stands here; More where that is not known. */
  maybe(mark: string): boolean {
    if (this.text.startsWith(mark, this.at)) {
      this.at += mark.length;
      return true;
    }
    if (mark.startsWith(this.text.slice(this.at))) throw new More();
    return false;
  }

  /** The one of the marks that stands here, none of which begins another. */
  #oneOf(marks: readonly string[]): string {
    const found = marks.find((mark) => this.text.startsWith(mark, this.at));
    if (found !== undefined) {
      this.at += found.length;
      return found;
    }
    const rest = this.text.slice(this.at);
    throw marks.some((mark) => mark.startsWith(rest)) ? new More() : new Other();
  }

  /** What ends what a text begins: a fence, a tag, or nothing (""). */
  wrapper(): string {
    if (this.text.startsWith("<")) return `</${this.#oneOf(TAGS.map((name) => `<${name}>`)).slice(1)}`;
    if (!this.maybe("```")) return "";
    const [fence = "", line] = FENCE.exec(this.text) ?? [];
    this.at = fence.length;
    if (line === undefined && this.at === this.text.length) throw new More();
    return "```";
  }

  /** The name of the tool, read on to where its arguments begin. */
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
