/** Builds the parts of a structural tag of xgrammar. */

import type { Spelling } from "./format.js";

export type Tag = { readonly type: string } & Readonly<Record<string, unknown>>;
export type Around = Tag & { readonly type: "tag"; readonly begin: string; readonly end: string };

/** Writes the grammar of arguments that are not JSON; `schema` is the schema of the tool's parameters. */
export type SpelledArguments = (spelling: Spelling, schema: object, strict: boolean) => Around;

/** A grammar of the empty text, because xgrammar rejects an empty `const_string`. */
export const NOTHING: Tag = { type: "grammar", grammar: 'root ::= ""' };

export function constant(value: string): Tag {
  return { type: "const_string", value };
}

/** The content between two fixed texts. */
export function tag(begin: string, content: Tag, end: string): Around {
  return { type: "tag", begin, content, end };
}

/** The tag `inner` with more text before and behind it. */
export function around(begin: string, inner: Around, end: string): Around {
  return { ...inner, begin: begin + inner.begin, end: inner.end + end };
}

export function either(parts: readonly Tag[]): Tag {
  const [only] = parts;
  return only && parts.length === 1 ? only : { type: "or", elements: parts };
}

export function inOrder(parts: readonly Tag[]): Tag {
  const [only] = parts;
  return only && parts.length === 1 ? only : { type: "sequence", elements: parts };
}

/** One or several of the tags; with `least` 0, none is allowed too. */
export function repeated(tags: readonly Tag[], separator: string, least = 1): Tag {
  return { type: "tags_with_separator", tags, separator, at_least_one: least > 0 };
}

/**
 * The compiler of the grammar reads `strict` and `param`: they say how to treat keywords that cannot be enforced, and
 * which parameter an error names.
 */
export function schemaTag(schema: unknown, strict: boolean, param: string): Tag {
  return { type: "json_schema", json_schema: schema, strict, param };
}
