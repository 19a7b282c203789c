/**
 * Arguments of earlier calls, which models wrote and limits cut, read as far as they are JSON: as in
 * edge_runtime/tools/arguments.py (tests/vectors/tools/messages.json).
 */

import { type ExactMap, readExact } from "../text/jinja/exact.js";

const CLOSING: Readonly<Record<string, string>> = { "{": "}", "[": "]" };

/**
 * The object that a text of JSON is, with all digits and in its order. Of one that was cut: what came of it, with open texts and brackets closed, or
 * else without its last part. Of a text that is no such thing: an object without members.
 */
export function argumentsOf(text: string): ExactMap {
  const found = objectIn(text);
  if (found) return found;
  const [whole, cut] = completed(text);
  return objectIn(whole) ?? objectIn(cut) ?? new Map();
}

/** The object of a text of JSON, empty for other values; null where it is no JSON. */
function objectIn(text: string): ExactMap | null {
  try {
    const { value } = readExact(text);
    return value instanceof Map ? (value as ExactMap) : new Map();
  } catch {
    return null;
  }
}

/**
 * The text with control characters in strings escaped and everything open closed; and the same of the text before
 * its last comma, or up to its last open bracket.
 */
function completed(text: string): [whole: string, cut: string] {
  const made: string[] = [];
  /** The closing signs of what is open. */
  const closing: string[] = [];
  /** The length of the second text, and what has been closed behind it. */
  let safe = 0;
  let closed: string[] = [];
  let inString = false;
  let escaped = false;
  for (const char of text) {
    if (inString) {
      made.push(char < " " ? `\\u${char.charCodeAt(0).toString(16).padStart(4, "0")}` : char);
      inString = escaped || char !== '"';
      escaped = char === "\\" && !escaped;
      continue;
    }
    if (char === ",") [safe, closed] = [made.length, []];
    made.push(char);
    inString = char === '"';
    const close = Object.hasOwn(CLOSING, char) ? CLOSING[char] : undefined;
    if (close) {
      closing.push(close);
      [safe, closed] = [made.length, []];
    } else if (char === closing.at(-1)) {
      closing.pop();
      closed.push(char);
    }
  }
  if (escaped) made.pop();
  const end = [...closing].reverse().join("");
  const openThere = [...closing, ...closed.reverse()].reverse().join("");
  return [made.join("") + (inString ? '"' : "") + end, made.slice(0, safe).join("") + openThere];
}
