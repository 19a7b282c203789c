/**
 * What an answer must match: a kind and its text (a JSON schema, a regular expression, an EBNF grammar with a
 * rule `root`, a structural tag of xgrammar). The kind "json_object" has an empty text.
 */
export interface Grammar {
  readonly kind: "json_object" | "json_schema" | "regex" | "ebnf" | "structural_tag";
  readonly text: string;
  /** The request's field that errors name; response_format by default. */
  readonly param?: string;
}
