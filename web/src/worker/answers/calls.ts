/** Reads the calls in a section of an answer: their names and their arguments. */

import type { FunctionTool } from "../../protocol/openai.js";
import type { CallFormat, Named } from "./format.js";
import { Nesting } from "./nesting.js";
import { Cursor, isObject, jsonOf, matchAt, SpelledReader, Wrong, written } from "./values.js";

/** The name of a tool where the format writes names without quotes. */
export const NAME = /[^ \t\r\n<>[\](){}|"',:=]+/y;
/** The white space that JSON allows between its parts. */
export const BLANKS = " \t\r\n";
/** A regular expression for any amount of JSON's white space. */
export const BLANK = "[ \\t\\r\\n]*";

/** A tool's name and the JSON of its arguments. If the call was cut, `arguments` holds the beginning. */
export interface Call {
  readonly name: string;
  readonly arguments: string;
}

/**
 * The calls of a section; null if the section does not match the format. `tools` are the tools of the request: their
 * schemas give the types of arguments that the format writes without quotes.
 */
export function callsIn(text: string, form: CallFormat, tools: readonly FunctionTool[]): Call[] | null {
  try {
    return form.named ? namedCalls(text, form, form.named, tools) : objectCalls(jsonOf(text), form);
  } catch (error) {
    if (error instanceof Wrong) return null;
    throw error;
  }
}

function objectCalls(data: unknown, form: CallFormat): Call[] {
  const records: readonly unknown[] = form.listed && Array.isArray(data) ? data : [data];
  if (records.length === 0) throw new Wrong("no calls");
  return records.map((record) => objectCall(record, form));
}

/**
 * Reads a call that is a JSON object. Some models write `parameters` where their format says `arguments`, or the
 * reverse.
 */
function objectCall(record: unknown, form: CallFormat): Call {
  const name = isObject(record) ? record[form.name] : undefined;
  if (!isObject(record) || typeof name !== "string") throw new Wrong("no call");
  const found = argumentNames(form).find((word) => Object.hasOwn(record, word));
  const given = found === undefined ? {} : record[found];
  if (typeof given === "string") return { name, arguments: given };
  if (!isObject(given)) throw new Wrong("arguments are an object");
  return { name, arguments: written(given) };
}

/** The keys under which a call may have its arguments. */
export function argumentNames(form: CallFormat): string[] {
  return [...new Set([form.arguments, "arguments", "parameters"])];
}

/** Reads calls that are written as a name and then arguments. */
function namedCalls(text: string, form: CallFormat, named: Named, tools: readonly FunctionTool[]): Call[] {
  const cursor = new Cursor(text, 0);
  const calls: Call[] = [];
  const follows = (mark: string): boolean => {
    cursor.blanks();
    return text.startsWith(mark, cursor.at);
  };
  if (form.listed) cursor.take("[");
  calls.push(namedCall(cursor, form, named, tools));
  while (form.listed && !follows("]")) {
    cursor.take(",");
    calls.push(namedCall(cursor, form, named, tools));
  }
  if (form.listed) cursor.take("]");
  cursor.blanks();
  if (cursor.at !== text.length) throw new Wrong("more than calls");
  return calls;
}

function namedCall(cursor: Cursor, form: CallFormat, named: Named, tools: readonly FunctionTool[]): Call {
  cursor.take(named.before);
  cursor.blanks();
  const name = matchAt(NAME, cursor.text, cursor.at);
  if (!name) throw new Wrong("a call without a name");
  cursor.at += name.length;
  const until = named.until || named.after;
  if (until) cursor.until(until);
  if (form.spelling) {
    const tool = tools.find(({ function: { name: own } }) => own === name);
    const reader = new SpelledReader(form.spelling, cursor, tool?.function.parameters);
    return { name, arguments: written(reader.arguments()) };
  }
  cursor.blanks();
  const given = cursor.text.slice(cursor.at);
  const end = new Nesting().end(given);
  const json = given.slice(0, end ?? undefined);
  if (end === null || !isObject(jsonOf(json))) throw new Wrong("arguments are an object");
  cursor.at += end;
  return { name, arguments: json };
}

/**
 * The beginning of a call in a section that was cut: its name, and its arguments so far if the format writes them as
 * JSON. Null if the name is not complete.
 */
export function begunCall(text: string, form: CallFormat): Call | null {
  const found = form.named ? begunNamed(text, form, form.named) : begunObject(text, form);
  if (!found) return null;
  const [name, begun] = found;
  // The arguments may be complete, with only the end of the section missing.
  return {
    name,
    arguments: begun.startsWith("{") ? begun.slice(0, new Nesting().end(begun) ?? undefined) : "",
  };
}

function begunObject(text: string, form: CallFormat): readonly [string, string] | null {
  const words = argumentNames(form).map(escaped).join("|");
  const pattern =
    `^[ \\t\\r\\n\\[]*\\{${BLANK}"${escaped(form.name)}"${BLANK}:${BLANK}("(?:[^"\\\\]|\\\\.)*")` +
    `(?:${BLANK},${BLANK}"(?:${words})"${BLANK}:${BLANK}(.*))?`;
  const found = new RegExp(pattern, "s").exec(text);
  try {
    return found ? [String(jsonOf(found[1] ?? '""')), found[2] ?? ""] : null;
  } catch (error) {
    if (error instanceof Wrong) return null;
    throw error;
  }
}

function begunNamed(text: string, form: CallFormat, named: Named): readonly [string, string] | null {
  const start = withoutStart(text, form.listed ? `${BLANKS}[` : BLANKS);
  if (!start.startsWith(named.before)) return null;
  const name = matchAt(NAME, start, named.before.length);
  const end = named.before.length + (name?.length ?? 0);
  // Without a sign behind it, the name may be incomplete.
  if (!name || end === start.length) return null;
  const until = named.until || named.after;
  const found = until ? start.indexOf(until, end) : end;
  if (form.spelling || found < 0) return [name, ""];
  return [name, withoutStart(start.slice(found + until.length), BLANKS)];
}

function withoutStart(text: string, characters: string): string {
  let at = 0;
  while (at < text.length && characters.includes(text.charAt(at))) at++;
  return text.slice(at);
}

export function escaped(text: string): string {
  return text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
}
