/** Parts of a structural tag of xgrammar. */

import type { Spelling } from "./format.js";

export type Tag = { readonly type: string } & Readonly<Record<string, unknown>>;
export type Around = Tag & { readonly type: "tag"; readonly begin: string; readonly end: string };

/** The arguments of a call that are not JSON, as a tag; `schema`: the tool's parameters. */
export type SpelledArguments = (spelling: Spelling, schema: object, strict: boolean) => Around;

/** The empty text; a `const_string` may not be empty. */
export const NOTHING: Tag = { type: "grammar", grammar: 'root ::= ""' };

export function constant(value: string): Tag {
  return { type: "const_string", value };
}

/** The content between two texts. */
export function tag(begin: string, content: Tag, end: string): Around {
  return { type: "tag", begin, content, end };
}

/** A tag with more before and after it. */
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

/** One of these or several; none too where `least` is 0. */
export function repeated(tags: readonly Tag[], separator: string, least = 1): Tag {
  return { type: "tags_with_separator", tags, separator, at_least_one: least > 0 };
}

/** `strict` and `param` are for who compiles it. */
export function schemaTag(schema: unknown, strict: boolean, param: string): Tag {
  return { type: "json_schema", json_schema: schema, strict, param };
}
