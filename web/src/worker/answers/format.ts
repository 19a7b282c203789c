/** How a model marks reasoning and calls in its answers; src/format/constants.ts describes each field. */

import { Field, show } from "../../artifact/json.js";
import { ArtifactError } from "../../protocol/errors.js";

/** Default values of the fields that a manifest may omit. */
const MARKS = { begin: "", end: "", after: "" };
const NAMED = { before: "", after: "", until: "" };
const SPELLING = {
  begin: "",
  end: "",
  before_name: "",
  after_name: "",
  after_value: "",
  separator: "",
  quotes: [] as readonly string[],
  raw: false,
  words: ["true", "false", "null"] as readonly string[],
};
const CALLS = {
  begin: "",
  end: "",
  also: [] as readonly string[],
  bare: "",
  blank: "",
  separator: "",
  repeats: false,
  listed: false,
  name: "name",
  arguments: "arguments",
};
const ANSWERS = { family: "", text: "", dropped: [] as readonly string[] };

export type Marks = Readonly<typeof MARKS>;
export type Named = Readonly<typeof NAMED>;
export type Spelling = Readonly<typeof SPELLING>;
export type CallFormat = Readonly<typeof CALLS> & {
  readonly named: Named | null;
  readonly spelling: Spelling | null;
};
export type AnswerFormat = Readonly<typeof ANSWERS> & {
  readonly reasoning: Marks | null;
  readonly calls: CallFormat | null;
};

/** Reads the record of a manifest. Throws ArtifactError if a field has another type than its default value. */
export function readAnswerFormat(value: unknown, path: string): AnswerFormat {
  const { reasoning, calls, ...plain } = recordOf(value, path);
  return {
    ...filled(ANSWERS, plain, path),
    reasoning: reasoning == null ? null : filled(MARKS, recordOf(reasoning, path), `${path}.reasoning`),
    calls: calls == null ? null : readCalls(recordOf(calls, path), `${path}.calls`),
  };
}

export function readCalls({ named, spelling, ...plain }: Record<string, unknown>, path: string): CallFormat {
  return {
    ...filled(CALLS, plain, path),
    named: named == null ? null : filled(NAMED, recordOf(named, path), `${path}.named`),
    spelling: spelling == null ? null : filled(SPELLING, recordOf(spelling, path), `${path}.spelling`),
  };
}

function recordOf(value: unknown, path: string): Record<string, unknown> {
  if (typeof value === "object" && value !== null && !Array.isArray(value))
    return value as Record<string, unknown>;
  throw new ArtifactError(`${path} should be an object, but is ${show(value)}. Build the artifact again.`);
}

function filled<T extends object>(defaults: T, given: Record<string, unknown>, path: string): T {
  const fields = Object.entries(defaults).map(([name, byDefault]: [string, unknown]) => {
    const field = new Field<unknown>(given[name] ?? byDefault, `${path}.${name}`);
    if (Array.isArray(byDefault))
      return [name, new Field<string[]>(field.value, field.path).list((one) => one.string())];
    return [name, typeof byDefault === "string" ? field.string() : field.value === true];
  });
  return Object.fromEntries(fields) as T;
}
