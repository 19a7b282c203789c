/**
 * Reads the JSON arguments of earlier calls as far as they are valid: a model wrote them, and a token limit may have
 * cut them. edge_runtime/tools/arguments.py does the same (tests/vectors/tools/messages.json tests both).
 */

import { type ExactMap, readExact } from "../text/jinja/exact.js";

const CLOSING: Readonly<Record<string, string>> = { "{": "}", "[": "]" };

/**
 * Parses a JSON object, keeping all digits of its numbers and the order of its names. If the text was cut, open
 * strings and brackets are closed, or the unfinished last part is dropped. A text that is not a JSON object gives an
 * empty map.
 */
export function argumentsOf(text: string): ExactMap {
  const found = objectIn(text);
  if (found) return found;
  const [whole, cut] = completed(text);
  return objectIn(whole) ?? objectIn(cut) ?? new Map();
}

/** Parses a JSON object; an empty map for other JSON values, null where the text is not JSON. */
function objectIn(text: string): ExactMap | null {
  try {
    const { value } = readExact(text);
    return value instanceof Map ? (value as ExactMap) : new Map();
  } catch {
    return null;
  }
}

/**
 * Completes a JSON text that was cut. `whole` is the text with control characters in strings escaped and all open
 * strings and brackets closed. `cut` is the same, made from the text before its last comma or up to its last opening
 * bracket.
 */
function completed(text: string): [whole: string, cut: string] {
  const made: string[] = [];
  /** The closing signs of the brackets that are open. */
  const closing: string[] = [];
  /** The length of `cut`, and the brackets that the text has closed behind it. */
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
