/** Streams calls whose arguments are JSON objects: finds where the arguments begin. */

import { argumentNames, BLANK, escaped, NAME } from "./calls.js";
import type { CallFormat } from "./format.js";

/** The text before the arguments of a call: the name in it, whether it begins a list, and where it ends. */
export interface CallHead {
  readonly name: string;
  readonly isListed: boolean;
  readonly end: number;
}

/**
 * Whether a section's arguments can be streamed: they are JSON, and the grammar enforces them. The grammar does so
 * only in sections that begin with the first mark of the format, or without a mark.
 */
export function isStreamed({ spelling, begin, bare }: CallFormat, mark: string): boolean {
  return !spelling && (mark ? mark.endsWith(begin) : bare !== "");
}

/**
 * The head of the call with which a text begins. `more` says that another call of the list stands before it. Null if
 * the head is not complete, or is not written as the format says.
 */
export function headIn(
  text: string,
  form: CallFormat,
  names: ReadonlySet<string>,
  more: boolean,
): CallHead | null {
  const found = patternOf(form, more).exec(text);
  const [head = "", list = "", name = ""] = found ?? [];
  return found && names.has(name) ? { name, isListed: list !== "", end: head.length } : null;
}

const patterns = new WeakMap<CallFormat, Map<boolean, RegExp>>();

function patternOf(form: CallFormat, more: boolean): RegExp {
  const made = patterns.get(form) ?? new Map<boolean, RegExp>();
  patterns.set(form, made);
  const pattern = made.get(more) ?? headOf(form, more);
  made.set(more, pattern);
  return pattern;
}

function headOf(form: CallFormat, more: boolean): RegExp {
  const before = more ? "," : form.listed ? "\\[?" : "";
  let call: string;
  if (form.named) {
    const until = escaped(form.named.until || form.named.after);
    const passed = until && `(?:(?!${until})[^{])*${until}`;
    call = `${escaped(form.named.before)}${BLANK}(${NAME.source})${passed}`;
  } else {
    const words = argumentNames(form).map(escaped).join("|");
    const name = `"${escaped(form.name)}"${BLANK}:${BLANK}"([^"\\\\]+)"`;
    call = `\\{${BLANK}${name}${BLANK},${BLANK}"(?:${words})"${BLANK}:`;
  }
  return new RegExp(`^${BLANK}(${before})${BLANK}${call}${BLANK}(?=\\{)`);
}
