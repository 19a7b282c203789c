/** Calls whose arguments are an object of JSON, read while it comes: where they begin and where they end. */

import { argumentNames, BLANK, escaped, NAME } from "./calls.js";
import type { CallFormat } from "./format.js";

/** What stands before the arguments of a call: its name, whether it is in a list, and where it ends. */
export interface Head {
  readonly name: string;
  readonly isListed: boolean;
  readonly end: number;
}

/**
 * Whether the arguments of a section's calls are JSON as they stand, and a grammar has kept them to it. It
 * follows the mark with which sections begin, or none; what another mark begins it does not see.
 */
export function isStreamed({ spelling, begin, bare }: CallFormat, mark: string): boolean {
  return !spelling && (mark ? mark.endsWith(begin) : bare !== "");
}

/**
 * The head of the call with which a text begins. `more`: a call of a list stands before it. Null: it has not
 * come yet, or is not as models are told to write it.
 */
export function headIn(
  text: string,
  form: CallFormat,
  names: ReadonlySet<string>,
  more: boolean,
): Head | null {
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
