/**
 * The regular expressions in a JSON schema that grammars can enforce; patterns.py has the same rules for
 * Python's parser.
 *
 * A pattern must match the whole string. Its characters are written unescaped, so they exclude characters
 * that JSON escapes.
 */

const ESCAPED = "a quote, a backslash or a control character in it cannot be enforced";
const ANCHOR = "^ and $ are only enforced at its ends, \\b nowhere";
const FLAGS = "flags inside it are not taken";
/** Characters that are written as a backslash and a letter. */
const CONTROLS: Readonly<Record<string, string>> = {
  n: "\n",
  t: "\t",
  r: "\r",
  f: "\f",
  v: "\v",
  a: "\x07",
  "0": "\0",
};
const QUANTIFIER = /^(?:[*+?]|\{\d+(?:,\d*)?\})/;

/** First and last code point. */
type Range = readonly [number, number];

type Node =
  | { readonly is: "literal"; readonly char: string }
  | { readonly is: "class"; readonly ranges: readonly Range[] }
  | { readonly is: "anchor"; readonly at: "begin" | "end" }
  /** `times` is the count as EBNF writes it. */
  | { readonly is: "repeat"; readonly of: Node; readonly times: string }
  | { readonly is: "group"; readonly of: Branches };
type Sequence = readonly Node[];
type Branches = readonly Sequence[];

const LAST = 0x10ffff;
const DIGITS: readonly Range[] = [[0x30, 0x39]];
const LETTERS: readonly Range[] = [...DIGITS, [0x41, 0x5a], [0x5f, 0x5f], [0x61, 0x7a]];
const BLANKS: readonly Range[] = [
  [0x09, 0x0d],
  [0x20, 0x20],
];
const CLASSES: Readonly<Record<string, readonly Range[]>> = {
  d: DIGITS,
  D: complement(DIGITS),
  w: LETTERS,
  W: complement(LETTERS),
  s: BLANKS,
  S: complement(BLANKS),
};
/** Surrogates, which no UTF-8 text has. */
const SURROGATES: Range = [0xd800, 0xdfff];
/** Characters that JSON escapes: control characters, quotes and backslashes. */
const UNWRITTEN: readonly Range[] = [[0, 0x1f], [0x22, 0x22], [0x5c, 0x5c], SURROGATES];
/** The most characters beyond ASCII that are listed one by one. */
const MOST_LISTED = 256;

/** Why a pattern cannot be enforced; null if it can. */
export function whyNot(pattern: unknown): string | null {
  if (typeof pattern !== "string") return "it must be a regular expression";
  try {
    const branches = new Reader(pattern).branches();
    ofWhole(branches);
    patternRule(pattern);
    new RegExp(pattern, "u");
    return null;
  } catch (error) {
    return error instanceof Error ? error.message : String(error);
  }
}

/** Why matching by backtracking may take long for a pattern that `whyNot` accepts; null if it does not. */
export function slow(pattern: string): string | null {
  return repeats(new Reader(pattern).branches()) <= 2 ? null : "with properties it has too many repeats";
}

/**
 * The grammar of the texts that a regular expression matches from end to end. Throws an Error that says why
 * it cannot be enforced.
 */
export function regexGrammar(pattern: string): string {
  ofWhole(new Reader(pattern).branches(), false);
  new RegExp(pattern, "u");
  return `root ::= ${patternRule(pattern, [SURROGATES])}`;
}

/**
 * The EBNF of the texts that a pattern matches from end to end; the pattern must pass `whyNot`. By default
 * the texts are written as in JSON strings.
 */
export function patternRule(pattern: string, unwritten: readonly Range[] = UNWRITTEN): string {
  const whole = (branches: Branches): string =>
    branches.map((branch) => branch.map(ofNode).join(" ") || '""').join(" | ");
  const ofNode = (node: Node): string => {
    switch (node.is) {
      case "literal":
        return `"${codeOf(node.char.codePointAt(0) ?? 0)}"`;
      case "class":
        return classRule(node.ranges, unwritten);
      case "anchor":
        return '""';
      case "repeat":
        return `(${ofNode(node.of)})${node.times}`;
      case "group":
        return `(${whole(node.of)})`;
    }
  };
  return whole(new Reader(pattern).branches());
}

/**
 * One of the characters in `ranges`. In the library's classes only ASCII counts: a negated class contains all
 * other characters, and a plain class contains none. So other characters are listed one by one; if there are
 * too many, only the ASCII characters remain.
 */
export function classRule(ranges: readonly Range[], unwritten: readonly Range[] = UNWRITTEN): string {
  const missing = complement(complement([...complement(ranges), ...unwritten]));
  const written = (some: readonly Range[]): string =>
    some.map(([low, high]) => `${codeOf(low)}-${codeOf(high)}`).join("");
  const ascii = (some: readonly Range[]): Range[] =>
    some.filter(([low]) => low < 0x80).map(([low, high]) => [low, Math.min(high, 0x7f)]);
  const beyond = missing.filter(([low, high]) => high >= 0x80 && low !== SURROGATES[0]);
  if (beyond.length === 0) return `[^${written(ascii(missing))}]`;
  const left = complement(missing);
  const others = left
    .filter(([, high]) => high >= 0x80)
    .map(([low, high]) => [Math.max(low, 0x80), high] as const);
  const count = others.reduce((sum, [low, high]) => sum + high - low + 1, 0);
  const listed = count > MOST_LISTED ? [] : others.flatMap(([low, high]) => charsOf(low, high));
  const plain = written(ascii(left));
  const parts = [...(plain === "" ? [] : [`[${plain}]`]), ...listed];
  if (parts.length === 0) throw new Error("a class of it has no character that can be enforced");
  return parts.length > 1 ? `(${parts.join(" | ")})` : parts.join("");
}

function charsOf(low: number, high: number): string[] {
  return Array.from({ length: high - low + 1 }, (_, at) => `"${codeOf(low + at)}"`);
}

function codeOf(code: number): string {
  const digits = code.toString(16);
  return code < 0x10000 ? `\\u${digits.padStart(4, "0")}` : `\\U${digits.padStart(8, "0")}`;
}

export function complement(ranges: readonly Range[]): Range[] {
  const made: Range[] = [];
  let next = 0;
  for (const [low, high] of [...ranges].sort(([a], [b]) => a - b)) {
    if (low > next) made.push([next, low - 1]);
    next = Math.max(next, high + 1);
  }
  if (next <= LAST) made.push([next, LAST]);
  return made;
}

/** The most repetitions in a row. A pattern that repeats more than a single character may take for ever. */
function repeats(branches: Branches): number {
  let count = 0;
  for (const node of branches.flat()) {
    if (node.is === "repeat") count += node.of.is === "group" ? Number.POSITIVE_INFINITY : 1;
    if (node.is === "group") count += repeats(node.of);
  }
  return count;
}

/**
 * Checks the branches of a whole pattern, which may have anchors only at the ends of the pattern or of its
 * alternatives.
 */
function ofWhole(branches: Branches, escaped = true): void {
  for (const branch of branches) {
    const from = isAnchor(branch[0], "begin") ? 1 : 0;
    const to = branch.length - (isAnchor(branch.at(-1), "end") ? 1 : 0);
    ofSequence(branch.slice(from, Math.max(from, to)), escaped);
  }
}

function isAnchor(node: Node | undefined, at: "begin" | "end"): boolean {
  return node?.is === "anchor" && node.at === at;
}

function ofSequence(nodes: Sequence, escaped: boolean): void {
  for (const node of nodes) ofNode(node, escaped);
}

/** Checks a node. `escaped`: characters that JSON escapes are rejected. */
function ofNode(node: Node, escaped: boolean): void {
  if (node.is === "anchor") throw new Error(ANCHOR);
  if (escaped && node.is === "literal" && (node.char < " " || node.char === '"' || node.char === "\\"))
    throw new Error(ESCAPED);
  if (node.is === "repeat") ofNode(node.of, escaped);
  if (node.is === "group") for (const branch of node.of) ofSequence(branch, escaped);
}

/** Parses a pattern. Its errors say why the pattern cannot be enforced. */
class Reader {
  #at = 0;

  constructor(private readonly text: string) {}

  branches(depth = 0): Branches {
    if (depth > 50) throw new Error("it is nested too deeply");
    const branches: Node[][] = [[]];
    while (this.#at < this.text.length && this.#next !== ")") {
      if (this.#take("|")) branches.push([]);
      else branches.at(-1)?.push(this.#repeated(this.#node(depth)));
    }
    if (depth === 0 && this.#at < this.text.length) throw new Error("unbalanced parenthesis");
    return branches;
  }

  get #next(): string {
    return String.fromCodePoint(this.text.codePointAt(this.#at) ?? 0);
  }

  #take(what: string): boolean {
    const found = this.text.startsWith(what, this.#at);
    if (found) this.#at += what.length;
    return found;
  }

  #char(): string {
    if (this.#at >= this.text.length) throw new Error("it ends too early");
    const char = this.#next;
    this.#at += char.length;
    return char;
  }

  #repeated(node: Node): Node {
    const [quantifier] = QUANTIFIER.exec(this.text.slice(this.#at)) ?? [];
    if (quantifier === undefined) return node;
    this.#at += quantifier.length;
    this.#take("?");
    if (QUANTIFIER.test(this.text.slice(this.#at))) throw new Error("multiple repeat");
    if (node.is === "anchor") throw new Error(ANCHOR);
    return { is: "repeat", of: node, times: quantifier };
  }

  #node(depth: number): Node {
    const char = this.#char();
    switch (char) {
      case "^":
        return { is: "anchor", at: "begin" };
      case "$":
        return { is: "anchor", at: "end" };
      case ".":
        return { is: "class", ranges: [[0, LAST]] };
      case "[":
        return this.#class();
      case "(":
        return this.#group(depth);
      case "\\":
        return this.#escape();
      case "*":
      case "+":
      case "?":
      case "{":
        throw new Error("nothing to repeat");
      default:
        return { is: "literal", char };
    }
  }

  #group(depth: number): Node {
    if (this.#take("?") && !this.#take(":")) {
      if (/^(?:<?[=!]|P=)/.test(this.text.slice(this.#at)))
        throw new Error("what looks around cannot be enforced");
      if (!/^P?<[A-Za-z_]\w*>/.test(this.text.slice(this.#at))) throw new Error(FLAGS);
      this.#at = this.text.indexOf(">", this.#at) + 1;
    }
    const of = this.branches(depth + 1);
    if (!this.#take(")")) throw new Error("missing ), unterminated subpattern");
    return { is: "group", of };
  }

  #escape(): Node {
    const char = this.#char();
    const ranges = Object.hasOwn(CLASSES, char) ? CLASSES[char] : undefined;
    if (ranges) return { is: "class", ranges };
    if ("bBAZ".includes(char)) throw new Error(ANCHOR);
    const code = { x: 2, u: 4, U: 8 }[char];
    if (code !== undefined) {
      const digits = this.text.slice(this.#at, this.#at + code);
      if (digits.length < code || !/^[\da-fA-F]+$/.test(digits))
        throw new Error(`incomplete escape \\${char}`);
      this.#at += code;
      return { is: "literal", char: String.fromCodePoint(Number.parseInt(digits, 16)) };
    }
    if (char !== "0" && /\d/.test(char)) throw new Error("a reference back to a group cannot be enforced");
    const control = Object.hasOwn(CONTROLS, char) ? CONTROLS[char] : undefined;
    if (control !== undefined) return { is: "literal", char: control };
    if (/[a-zA-Z]/.test(char)) throw new Error(`bad escape \\${char}`);
    return { is: "literal", char };
  }

  /**
   * Parses a class. Quotes and backslashes are removed from it, which narrows the pattern; control characters
   * are rejected.
   */
  #class(): Node {
    const negated = this.#take("^");
    const ranges: Range[] = [];
    let controls = false;
    for (let first = true; first || this.#next !== "]"; first = false) {
      const node = this.#member();
      if (node.is === "class") ranges.push(...node.ranges);
      if (node.is !== "literal") continue;
      controls ||= node.char < " ";
      ranges.push(this.#range(node.char));
    }
    this.#at += 1;
    if (negated) return { is: "class", ranges: complement(ranges) };
    const [only] = ranges;
    // A class of one character becomes that character.
    if (only && ranges.length === 1 && only[0] === only[1])
      return { is: "literal", char: String.fromCodePoint(only[0]) };
    if (controls) throw new Error("a control character in it cannot be enforced");
    return { is: "class", ranges };
  }

  /** Parses a member of a class: one character, or the first and the last one of a range. */
  #range(char: string): Range {
    const low = char.codePointAt(0) ?? 0;
    if (!/^-[^\]]/s.test(this.text.slice(this.#at))) return [low, low];
    this.#at += 1;
    const high = this.#member();
    const last = high.is === "literal" ? (high.char.codePointAt(0) ?? 0) : -1;
    if (last < low) throw new Error("bad character range");
    return [low, last];
  }

  #member(): Node {
    const char = this.#char();
    if (char !== "\\") return { is: "literal", char };
    return this.#take("b") ? { is: "literal", char: "\b" } : this.#escape();
  }
}
