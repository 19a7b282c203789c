/**
 * Regular expressions that enforce the tools' schemas in calls that do not keep to the model's format, which loose.ts
 * reads.
 */

import { BLANK } from "./calls.js";
import { WORDS } from "./loose.js";

/** Behind this text a grammar begins to check whether the text is a call. */
export const TRIGGER = '"name":';
/** A grammar of the further members of a call's object behind its arguments, and of its closing brace. */
export const MEMBERS = String.raw`root ::= ws ("," ws string ws ":" ws value ws)* "}"
value ::= string | number | "true" | "false" | "null" | object | array
object ::= "{" ws (string ws ":" ws value ws ("," ws string ws ":" ws value ws)*)? "}"
array ::= "[" ws (value ws ("," ws value ws)*)? "]"
string ::= "\"" ([^"\\\x00-\x1f] | "\\" escape)* "\""
escape ::= ["\\/bfnrt] | "u" [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F]
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
ws ::= [ \t\r\n]*
`;
const BEYOND = "[^\\x00-\\x7f]";
const LINE = "[^\\n]*";
const FEW = 4;

/** A regular expression of the text between TRIGGER and the arguments of a call of this tool. */
export function behindName(name: string): string {
  return `${BLANK}"${literals(written(name))}"${BLANK},${BLANK}"(${WORDS.join("|")})"${BLANK}:${BLANK}`;
}

/**
 * A regular expression of the text from TRIGGER to the end of the line if the text is not a call of one of these
 * tools.
 *
 * xgrammar stores a mask for each state of the expression. To have few states, the expression takes a name that
 * begins with the first FEW characters of a tool's name for the tool's name, and a key that begins as one of WORDS
 * for that word.
 */
export function noCallOf(names: readonly string[]): string {
  const key = `"(${diverging(WORDS.map((word) => word.slice(0, 1)))})`;
  const value = `${BLANK}(${not(",")}|,${BLANK}(${not('"')}|${key}))`;
  const spelled = names.map((name) => `${written(name)}"`);
  const all = [...spelled].sort().map(literals).join("|");
  const others = `${diverging(spelled.map((name) => name.slice(0, FEW)))}|(${all})${value}`;
  return `${BLANK}(${not('"')}|"(${others}))`;
}

/** A regular expression of a line that begins with neither white space nor the mark. */
function not(mark: string): string {
  return `[^ \\t\\r\\n${mark}]${LINE}`;
}

function written(name: string): string {
  return JSON.stringify(name).slice(1, -1);
}

/**
 * A regular expression of the shortest texts that are not the beginning of any of `texts`.
 *
 * Characters beyond ASCII have a single branch behind all beginnings, because xgrammar needs a dozen states for each
 * class of them.
 */
function diverging(texts: readonly string[]): string {
  return `${leaving(texts)}|${beginning(texts)}${BEYOND}${LINE}`;
}

/** Groups texts by their first character, in order: each character with the rests of the texts that begin with it. */
function branches(texts: readonly string[]): (readonly [string, readonly string[]])[] {
  const firsts = [...new Set(texts.flatMap((text) => text.slice(0, 1) || []))].sort();
  return firsts.map((char) => [
    char,
    texts.filter((text) => text.startsWith(char)).map((text) => text.slice(1)),
  ]);
}

function isMore(texts: readonly string[]): boolean {
  return texts.some((text) => text !== "");
}

/** A regular expression of text that differs from all of `texts` first in an ASCII character. */
function leaving(texts: readonly string[]): string {
  const found = branches(texts);
  const ways = found
    .filter(([, left]) => isMore(left))
    .map(([char, left]) => `${literals(char)}(${leaving(left)})`);
  const left = `[${asciiBut(found.map(([char]) => char.charCodeAt(0)))}]${LINE}`;
  return [left, ...ways].join("|");
}

/** A regular expression of any beginning of `texts`, without the whole texts. */
function beginning(texts: readonly string[]): string {
  const ways = branches(texts)
    .filter(([, left]) => isMore(left))
    .map(([char, left]) => literals(char) + beginning(left));
  return ways.length > 0 ? `(${ways.join("|")})?` : "";
}

/** The ASCII characters without those of `codes`, as ranges of a character class. */
function asciiBut(codes: readonly number[]): string {
  const edges = [-1, ...codes.filter((code) => code < 128).sort((a, b) => a - b), 128];
  const hex = (code: number): string => `\\x${code.toString(16).padStart(2, "0")}`;
  return edges
    .slice(1)
    .map((high, at) => [(edges[at] ?? 0) + 1, high - 1] as const)
    .filter(([low, high]) => low <= high)
    .map(([low, high]) => `${hex(low)}-${hex(high)}`)
    .join("");
}

/** Escapes a text for a regular expression of xgrammar. */
export function literals(text: string): string {
  return [...text]
    .map((char) => (/^[\p{L}\p{N} "'<>:;,_%&#@!~`=]$/u.test(char) ? char : `\\${char}`))
    .join("");
}
