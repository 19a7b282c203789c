/** Calls, from the text of a section to names and arguments. */

import type { FunctionTool } from "../../protocol/openai.js";
import type { CallFormat, Named } from "./format.js";
import { Nesting } from "./nesting.js";
import { Cursor, isObject, jsonOf, matchAt, SpelledReader, Wrong, written } from "./values.js";

/** A tool's name where it stands without quotes. */
export const NAME = /[^ \t\r\n<>[\](){}|"',:=]+/y;
/** Between the parts of JSON. */
export const BLANKS = " \t\r\n";
/** Any of these, in an expression. */
export const BLANK = "[ \\t\\r\\n]*";

/** A tool's name, and JSON of its arguments; of a call that was cut, as far as it came. */
export interface Call {
  readonly name: string;
  readonly arguments: string;
}

/**
 * The calls of a section; null if it is not what the format says. `tools`: those that were offered; their
 * schemas say what a raw argument is.
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

/** A call as an object. Some models write another of the two words for its arguments than they were told. */
function objectCall(record: unknown, form: CallFormat): Call {
  const name = isObject(record) ? record[form.name] : undefined;
  if (!isObject(record) || typeof name !== "string") throw new Wrong("no call");
  const found = argumentNames(form).find((word) => Object.hasOwn(record, word));
  const given = found === undefined ? {} : record[found];
  if (typeof given === "string") return { name, arguments: given };
  if (!isObject(given)) throw new Wrong("arguments are an object");
  return { name, arguments: written(given) };
}

/** The keys that an object may have its arguments under. */
export function argumentNames(form: CallFormat): string[] {
  return [...new Set([form.arguments, "arguments", "parameters"])];
}

/** Calls that are a name and then arguments. */
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
 * The call that a section begins which was cut: its name, and JSON of its arguments so far where they are
 * written as JSON. Null: no name yet.
 */
export function begunCall(text: string, form: CallFormat): Call | null {
  const found = form.named ? begunNamed(text, form, form.named) : begunObject(text, form);
  if (!found) return null;
  const [name, begun] = found;
  // They may be whole, and only the end of the section missing.
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
  // The rest of the name may be missing.
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
