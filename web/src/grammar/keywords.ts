// Written by `python -m nearfar.format.generate` from nearfar.format.keywords: change it there.

/** Keywords that forbid nothing, or (nullable) only allow more than the schema says. */
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

/** Keywords that apply to every type. */
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

/** Keywords whose value names schemas that other schemas can reference. */
export const DEFINITIONS = ["$defs", "definitions"] as const;

/**
 * Enforced keywords, by the type that they apply to. Unknown ones (neither here nor in STRUCTURE or
 * ANNOTATIONS) are rejected in strict schemas, and ignored in others.
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

/** The values that `type` can have. */
export const TYPES = ["string", "number", "integer", "object", "array", "boolean", "null"] as const;

/**
 * The most pairs of schemas to compare: their number grows with the square of a oneOf, and again with every
 * level below.
 */
export const MOST_COMPARED = 20000;

/** The most references that lead from one to the next. */
export const MOST_REFERENCES = 64;
