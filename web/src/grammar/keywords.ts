// Written by `python -m nearfar.format.generate` from nearfar.format.keywords: change it there.

/** Keywords that forbid nothing, or (nullable) only allow more than is written. */
export const ANNOTATIONS = [
  "title",
  "description",
  "default",
  "examples",
  "example",
  "$comment",
  "$schema",
  "deprecated",
  "readOnly",
  "writeOnly",
  "discriminator",
  "nullable",
  "contentMediaType",
  "contentEncoding",
  "contentSchema",
  "externalDocs",
  "xml",
] as const;

/** Keywords that speak of every type. */
export const STRUCTURE = [
  "type",
  "enum",
  "const",
  "anyOf",
  "oneOf",
  "allOf",
  "$ref",
  "$defs",
  "definitions",
] as const;

/** Keywords that name schemas for other schemas to refer to. */
export const DEFINITIONS = ["$defs", "definitions"] as const;

/**
 * Keywords that are kept to, by the type that they speak of. All others but ANNOTATIONS and STRUCTURE are
 * not.
 */
export const OF_TYPE = {
  string: ["minLength", "maxLength", "pattern", "format"],
  number: ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"],
  object: [
    "properties",
    "required",
    "additionalProperties",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "unevaluatedProperties",
  ],
  array: [
    "items",
    "additionalItems",
    "prefixItems",
    "minItems",
    "maxItems",
    "uniqueItems",
    "unevaluatedItems",
  ],
} as const;

/** What `type` can say. */
export const TYPES = ["string", "number", "integer", "object", "array", "boolean", "null"] as const;

/** Pairs of schemas: their number grows with the square of a oneOf, and again with every level below. */
export const MOST_COMPARED = 20000;

/** The most steps of a reference through other references. */
export const MOST_STEPS = 64;
