/** Strings as Python treats them: code points, white space and line ends. JavaScript's own functions differ. */

/**
 * White space as in Python's `str.isspace` and `\s`. JavaScript's \s has U+FEFF in addition, and lacks U+001C–U+001F
 * and U+0085.
 */
export const BLANK =
  "[\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]";
const BLANK_ONLY = new RegExp(`^${BLANK}+$`);
const BLANK_START = new RegExp(`^${BLANK}+`);
const BLANK_END = new RegExp(`${BLANK}+$`);
// The separators are written apart, because a linter reports U+001C–U+001E in a regular expression as a mistake.
const SEPARATORS = "\\x1c-\\x1e";
const LINE_ENDS = new RegExp(`\\r\\n|[\\n\\r\\v\\f${SEPARATORS}\\x85\\u2028\\u2029]`);

export function isBlank(text: string): boolean {
  return BLANK_ONLY.test(text);
}

/** `str.strip(chars)`, lstrip and rstrip; without `chars` they strip white space. */
export function stripped(
  text: string,
  chars: string | null,
  side: "start" | "end" | "both" = "both",
): string {
  if (chars === null) {
    const begun = side === "end" ? text : text.replace(BLANK_START, "");
    // A loop strips the end, because a regular expression would try every run of blanks in a long text.
    let end = begun.length;
    if (side !== "start") while (end > 0 && BLANK_END.test(begun.slice(end - 1, end))) end--;
    return begun.slice(0, end);
  }
  const points = [...text];
  let start = 0;
  let end = points.length;
  if (side !== "end") while (start < end && chars.includes(points[start] ?? "")) start++;
  if (side !== "start") while (end > start && chars.includes(points[end - 1] ?? "")) end--;
  return points.slice(start, end).join("");
}

/** `str.splitlines()`. */
export function lines(text: string, keepEnds = false): string[] {
  const made: string[] = [];
  for (let rest = text; rest !== ""; ) {
    const found = LINE_ENDS.exec(rest);
    const end = found ? found.index + found[0].length : rest.length;
    made.push(rest.slice(0, keepEnds || !found ? end : found.index));
    rest = rest.slice(end);
  }
  return made;
}

const BLANK_RUNS = new RegExp(`${BLANK}+`, "g");

/** `str.split(None, most)` and `rsplit`: splits at runs of white space. */
export function words(text: string, most = -1, fromEnd = false): string[] {
  const rest = stripped(text, null, fromEnd ? "end" : "start");
  const runs = [...rest.matchAll(BLANK_RUNS)];
  const made: string[] = [];
  let at = 0;
  for (const run of most < 0
    ? runs
    : fromEnd
      ? runs.slice(Math.max(runs.length - most, 0))
      : runs.slice(0, most)) {
    made.push(rest.slice(at, run.index));
    at = run.index + run[0].length;
  }
  // White space at an end that was not stripped is not a word.
  return [...made, rest.slice(at)].filter((word) => word !== "");
}

/** `str.split(separator, most)` and `rsplit`. */
export function splitAt(text: string, separator: string, most = -1, fromEnd = false): string[] {
  const parts = text.split(separator);
  if (most < 0 || parts.length <= most + 1) return parts;
  if (fromEnd) {
    const cut = parts.length - most;
    return [parts.slice(0, cut).join(separator), ...parts.slice(cut)];
  }
  return [...parts.slice(0, most), parts.slice(most).join(separator)];
}

/** The number of code points, as Python's `len` counts them. */
export function lengthOf(text: string): number {
  let count = 0;
  for (const _ of text) count++;
  return count;
}

/** Compares two strings by code points, as Python does; JavaScript's `<` compares UTF-16 units. */
export function compareTexts(a: string, b: string): number {
  const most = Math.min(a.length, b.length);
  for (let at = 0; at < most; at++) {
    const [x, y] = [a.charCodeAt(at), b.charCodeAt(at)];
    if (x !== y) return rank(x) - rank(y);
  }
  return a.length - b.length;
}

/** Surrogates encode code points above U+FFFF, so they rank behind all other units. */
function rank(unit: number): number {
  if (unit < 0xd800) return unit;
  return unit < 0xe000 ? unit + 0x2000 : unit - 0x800;
}

const ESCAPES: Readonly<Record<string, string>> = { "\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\" };

/** `repr` of a string. */
export function quoted(text: string): string {
  const quote = text.includes("'") && !text.includes('"') ? '"' : "'";
  const inner = text.replace(/[\\\n\r\t'"]|[\p{C}\p{Z}]/gu, (char) => {
    if (char === " ") return char;
    if (char === "'" || char === '"') return char === quote ? `\\${char}` : char;
    const known = ESCAPES[char];
    if (known) return known;
    const code = char.codePointAt(0) ?? 0;
    const [mark, digits] = code < 0x100 ? ["x", 2] : code < 0x10000 ? ["u", 4] : ["U", 8];
    return `\\${mark}${code.toString(16).padStart(digits, "0")}`;
  });
  return quote + inner + quote;
}

/**
 * The first letter of a word in title case. Where upper case gives two letters, as for ß, only the first stays upper
 * case.
 */
function large(letter: string): string {
  const [...upper] = letter.toUpperCase();
  const first = upper.findIndex((one) => /\p{Cased}/u.test(one));
  return upper.map((one, at) => (at > first ? one.toLowerCase() : one)).join("");
}

/** `str.title()`: the first letter of each word in upper case, all others in lower case. */
export function titled(text: string): string {
  return text.replace(
    /(\p{Cased})(\p{Cased}*)/gu,
    (_, first: string, rest: string) => large(first) + rest.toLowerCase(),
  );
}

/** `str.capitalize()`. */
export function capitalized(text: string): string {
  const [first = "", ...rest] = text;
  return large(first) + rest.join("").toLowerCase();
}

/** `text.replace(old, by, most)`. */
export function replaced(text: string, old: string, by: string, most = -1): string {
  if (most < 0 && old !== "") return text.replaceAll(old, () => by);
  let left = most < 0 ? Number.POSITIVE_INFINITY : most;
  if (old === "") {
    const points = [...text];
    const parts = points.flatMap((point) => (left-- > 0 ? [by, point] : [point]));
    return parts.join("") + (left > 0 ? by : "");
  }
  return splitAt(text, old, left).join(by);
}
