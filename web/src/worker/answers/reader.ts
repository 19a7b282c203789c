/**
 * Separates reasoning and calls from the text of an answer, while the text comes piece by piece (tests/vectors/tools
 * holds examples).
 */

import type { FunctionTool } from "../../protocol/openai.js";
import { BLANKS, begunCall, type Call, callsIn } from "./calls.js";
import type { AnswerFormat, CallFormat } from "./format.js";
import { candidates, following, type Opening, opening, UNSURE } from "./loose.js";
import { Nesting } from "./nesting.js";
import { type CallHead, headIn, isStreamed } from "./streaming.js";

/**
 * A piece of an answer: text for the user ("text") or reasoning ("reasoning"). "call" begins a call, with the tool's
 * name as `text`; "arguments" is a piece of the JSON of its arguments; "called" says that the call is complete.
 */
export interface Fragment {
  readonly kind: "text" | "reasoning" | "call" | "arguments" | "called";
  readonly text: string;
}

export interface ReaderOptions {
  /** The tools that may be called; without tools, calls are text. */
  readonly tools?: readonly FunctionTool[];
  /** The prompt has begun a section of reasoning. */
  readonly reasoningOpen?: boolean;
  /** The answer is calls alone: remains of cut marks and blank lines are dropped, not passed on as text. */
  readonly callsOnly?: boolean;
  /** Calls that do not keep to the model's format count, too (loose.ts). */
  readonly loose?: boolean;
}

/**
 * Reads an answer piece by piece. Text that may be the beginning of a mark is held back until that is certain. The
 * JSON arguments of a call are passed on as they come; every other section of calls is held back until it ends.
 */
export class AnswerReader {
  readonly #tools: readonly FunctionTool[];
  readonly #calls: CallFormat | null;
  readonly #names: ReadonlySet<string>;
  #kind: "text" | "reasoning" | "call" | "arguments" | "record" | "behind";
  #held = "";
  /** The mark that began the current section of calls. */
  #mark = "";
  #strip = false;
  /** No text for the user has come yet. */
  #start = true;
  #nesting = new Nesting();
  /** A call of this section has been passed on; "list" says that more calls of the same list may come. */
  #after: "" | "call" | "list" = "";
  readonly #isLoose: boolean;
  /** The opening of a call that does not keep to the format. */
  #loosely: Opening | null = null;
  /** The held text begins a line. */
  #fresh = true;

  constructor(
    private readonly form: AnswerFormat,
    private readonly options: ReaderOptions = {},
  ) {
    const { tools = [], reasoningOpen = false, loose = false } = options;
    this.#tools = tools;
    this.#names = new Set(tools.map((tool) => tool.function.name));
    this.#calls = tools.length > 0 ? form.calls : null;
    this.#isLoose = loose && this.#calls !== null;
    this.#kind = form.reasoning && reasoningOpen ? "reasoning" : "text";
  }

  /** Adds text and returns the fragments that are now certain. */
  push(text: string): Fragment[] {
    this.#held += text;
    return [...this.#split(false)];
  }

  /**
   * Ends the answer and returns the text that was held back. `cut` says that a limit, not the model, ended the
   * answer.
   */
  finish(cut: boolean): Fragment[] {
    const made = [...this.#split(true)];
    const held = this.#held;
    this.#held = "";
    if (this.#kind === "behind") {
      // The held text is the rest of a fence, or it is not a call.
      this.#kind = "text";
      return [...made, ...this.#plain(held.includes("{") && !cut ? held : "")];
    }
    if (this.#kind !== "call") return [...made, ...this.#plain(held)];
    const section = [...this.#section(held, cut || !!(this.#calls?.end && this.#mark))];
    // The model did not mean a call.
    if (section.length === 0 && !(cut || this.#after || this.options.callsOnly))
      section.push({ kind: "text", text: this.#mark + held });
    return [...made, ...section];
  }

  *#split(last: boolean): Generator<Fragment> {
    for (;;) {
      // Blank lines behind a section belong to the section.
      if (this.#strip) {
        this.#held = this.#held.replace(/^\n+/, "");
        this.#strip = this.#held === "";
      }
      if (this.#isStreaming) {
        yield* this.#streamed();
        if (this.#isStreaming) return;
      }
      if (this.#kind === "behind") {
        yield* this.#behind();
        if (this.#kind === "behind") return;
        continue;
      }
      if (this.#awaitsBare(last)) return;
      const marks = this.#nextMarks();
      const head = this.#head(marks);
      if (head) {
        yield { kind: "call", text: head.name };
        this.#held = this.#held.slice(head.end);
        this.#kind = "arguments";
        this.#nesting = new Nesting();
        this.#after = head.isListed ? "list" : "call";
        continue;
      }
      const { at, mark } = first(this.#held, marks, last);
      const loose = this.#kind === "text" && this.#isLoose ? this.#firstLoose(at, last) : null;
      if (loose) {
        const before = this.#held.slice(0, loose.at);
        this.#held = this.#held.slice(loose.at);
        yield* this.#plain(before);
        if (loose.found === UNSURE) return;
        yield* this.#beginLoose(loose.found);
        continue;
      }
      if (mark === null) {
        if (this.#kind === "call") return;
        const out = this.#held.slice(0, at);
        this.#held = this.#held.slice(at);
        yield* this.#plain(out);
        return;
      }
      const before = this.#held.slice(0, at);
      this.#held = this.#held.slice(at + mark.length);
      yield* this.#kind === "call" ? this.#section(before, false) : this.#plain(before);
      this.#switch(mark);
    }
  }

  get #isStreaming(): boolean {
    return this.#kind === "arguments" || this.#kind === "record";
  }

  /**
   * Passes on the held part of a call's arguments, and skips the rest of the object around them. After that object,
   * the kind is "call" again.
   */
  *#streamed(): Generator<Fragment> {
    while (this.#isStreaming && this.#held !== "") {
      const end = this.#nesting.end(this.#held);
      const isOfArguments = this.#kind === "arguments";
      const piece = this.#held.slice(0, end ?? undefined);
      this.#held = this.#held.slice(piece.length);
      if (isOfArguments) yield { kind: "arguments", text: piece };
      if (end === null) return;
      if (isOfArguments) yield { kind: "called", text: "" };
      const isObject = this.#loosely !== null || !this.#calls?.named;
      this.#kind = isOfArguments && isObject ? "record" : this.#loosely ? "behind" : "call";
      this.#nesting = new Nesting(1);
    }
  }

  /** Where, at most at `until`, a call that does not keep to the format begins or may begin. */
  #firstLoose(until: number, last: boolean): { at: number; found: Opening | typeof UNSURE } | null {
    for (const at of candidates(this.#held, this.#fresh)) {
      if (at > until) break;
      const found = opening(this.#held.slice(at), this.#names);
      if (found !== null && !(last && found === UNSURE)) return { at, found };
    }
    return null;
  }

  *#beginLoose(call: Opening): Generator<Fragment> {
    yield { kind: "call", text: call.name };
    this.#held = this.#held.slice(call.end);
    this.#kind = "arguments";
    this.#nesting = new Nesting();
    this.#loosely = call;
    this.#start = false;
  }

  /** Reads the text behind a call that does not keep to the format, as soon as it is certain. */
  *#behind(): Generator<Fragment> {
    if (!this.#loosely) return;
    const found = following(this.#held, this.#names, this.#loosely);
    if (found === UNSURE) return;
    if (typeof found !== "number") {
      yield* this.#beginLoose(found);
      return;
    }
    this.#held = this.#held.slice(found);
    this.#kind = "text";
    this.#loosely = null;
    this.#strip = true;
    this.#fresh = true;
  }

  /** The head of the call with which the held text begins; null if that call cannot be streamed. */
  #head(marks: readonly string[]): CallHead | null {
    const calls = this.#calls;
    if (this.#kind !== "call" || !calls || !isStreamed(calls, this.#mark) || this.#after === "call")
      return null;
    const head = headIn(this.#held, calls, this.#names, this.#after === "list");
    if (!head) return null;
    const before = this.#held.slice(0, head.end);
    return marks.some((mark) => before.includes(mark)) ? null : head;
  }

  /** Whether more text has to come first, because the held text may begin calls without a mark. */
  #awaitsBare(last: boolean): boolean {
    const bare = this.#calls?.bare;
    if (this.#kind !== "text" || !this.#start || !bare) return false;
    if (!this.#held.startsWith(bare)) return !last && bare.startsWith(this.#held);
    this.#kind = "call";
    this.#mark = "";
    this.#start = false;
    return false;
  }

  /** The marks that can end the current section. */
  #nextMarks(): string[] {
    const { reasoning, text, dropped } = this.form;
    const calls = this.#calls;
    if (this.#kind === "reasoning") return reasoning ? [reasoning.end] : [];
    let sections = calls ? [calls.begin, ...calls.also].filter((mark) => mark !== "") : [];
    if (this.#kind === "call") {
      if (!calls || !this.#mark) return [];
      if (calls.end) return [calls.end];
      return calls.repeats ? sections : [];
    }
    if (calls?.bare) {
      const held = this.#held;
      sections = sections.filter((mark) => this.#start && (held.startsWith(mark) || mark.startsWith(held)));
    }
    const others = [text, ...dropped].filter((mark) => mark !== "");
    return [...(reasoning ? [reasoning.begin] : []), ...sections, ...others];
  }

  #switch(mark: string): void {
    const calls = this.#calls;
    this.#after = "";
    this.#fresh = true;
    if (this.#kind === "reasoning" || (this.#kind === "call" && mark === calls?.end)) {
      this.#kind = "text";
      this.#strip = true;
    } else if (mark === this.form.reasoning?.begin) {
      this.#kind = "reasoning";
      this.#strip = true;
    } else if (calls && [calls.begin, ...calls.also].includes(mark)) {
      this.#kind = "call";
      this.#mark = mark;
      this.#strip = true;
      this.#start = false;
    }
  }

  *#plain(text: string): Generator<Fragment> {
    if (text === "") return;
    if (this.#kind === "reasoning") {
      yield { kind: "reasoning", text };
      return;
    }
    this.#start = false;
    const line = text.slice(text.lastIndexOf("\n") + 1);
    this.#fresh = /^[ \t]*$/.test(line) && (this.#fresh || text.includes("\n"));
    if (!this.options.callsOnly) yield { kind: "text", text };
  }

  /** Reads a section of calls, which may be cut. A section that does not match the format is text. */
  *#section(text: string, cut: boolean): Generator<Fragment> {
    const calls = this.#calls;
    if (!calls) return;
    const end = this.#mark && !cut ? calls.end : "";
    const rest = this.#after ? this.#leftOf(text, cut ? calls.end : "") : "";
    if (this.#after && !(this.#after === "list" && rest.startsWith(","))) {
      if (rest && !this.options.callsOnly) yield { kind: "text", text: rest + end };
      return;
    }
    const section = this.#after ? `[${rest.slice(1)}` : text;
    const found = callsIn(section, calls, this.#tools);
    if (found) {
      yield* whole(found);
      return;
    }
    if (!cut) {
      yield { kind: "text", text: (this.#after ? rest : this.#mark + text) + end };
      return;
    }
    const call = begunCall(section, calls);
    if (call) yield* begun(call);
  }

  /**
   * The rest of a section whose calls have been passed on. `end` is the closing mark, whose beginning may stand at
   * the end of the text.
   */
  #leftOf(text: string, end: string): string {
    const rest = stripped(text);
    const left = stripped(rest.slice(0, rest.length - overlap(rest, end)));
    return this.#after === "list" && left.startsWith("]") ? stripped(left.slice(1)) : left;
  }
}

function* whole(calls: readonly Call[]): Generator<Fragment> {
  for (const call of calls) {
    yield* begun(call);
    yield { kind: "called", text: "" };
  }
}

function* begun(call: Call): Generator<Fragment> {
  yield { kind: "call", text: call.name };
  if (call.arguments) yield { kind: "arguments", text: call.arguments };
}

function stripped(text: string): string {
  let from = 0;
  let to = text.length;
  while (from < to && BLANKS.includes(text.charAt(from))) from++;
  while (to > from && BLANKS.includes(text.charAt(to - 1))) to--;
  return text.slice(from, to);
}

interface Found {
  readonly at: number;
  readonly mark: string | null;
}

/**
 * The first mark in the text, the longest one at its place. With `mark` null, `at` is the length of the text that is
 * certainly no mark.
 */
function first(text: string, marks: readonly string[], last: boolean): Found {
  const found = marks
    .map((mark) => ({ at: text.indexOf(mark), mark }))
    .filter(({ at }) => at >= 0)
    .sort((a, b) => a.at - b.at || b.mark.length - a.mark.length)[0];
  if (last) return found ?? { at: text.length, mark: null };
  const begun = Math.min(text.length, ...marks.map((mark) => text.length - overlap(text, mark)));
  if (!found) return { at: begun, mark: null };
  // A longer mark may begin where the shorter one stands, or before it.
  const couldBeLonger = (mark: string): boolean => {
    for (let at = 0; at <= found.at; at++) {
      const rest = text.slice(at);
      if (rest !== mark && mark.startsWith(rest)) return true;
    }
    return false;
  };
  return marks.some(couldBeLonger) ? { at: Math.min(begun, found.at), mark: null } : found;
}

/** The length of the longest beginning of the mark with which the text ends. */
function overlap(text: string, mark: string): number {
  for (let n = Math.min(mark.length - 1, text.length); n > 0; n--)
    if (text.endsWith(mark.slice(0, n))) return n;
  return 0;
}
