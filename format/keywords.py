"""The JSON Schema keywords that answers must follow: one table for the grammars of Python and of browsers."""

from __future__ import annotations

ANNOTATIONS = (
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
)
"""Keywords that forbid nothing, or (nullable) only allow more than the schema says."""
STRUCTURE = ("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions")
"""Keywords that apply to every type."""
DEFINITIONS = ("$defs", "definitions")
"""Keywords whose value names schemas that other schemas can reference."""
OF_TYPE: dict[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "unevaluatedProperties",
    ),
    "array": (
        "items",
        "additionalItems",
        "prefixItems",
        "minItems",
        "maxItems",
        "uniqueItems",
        "unevaluatedItems",
    ),
}
"""Enforced keywords, by the type that they apply to. Unknown ones (neither here nor in STRUCTURE or
ANNOTATIONS) are rejected in strict schemas, and ignored in others.
"""
TYPES = ("string", "number", "integer", "object", "array", "boolean", "null")
"""The values that `type` can have."""
MOST_COMPARED = 20_000
"""The most pairs of schemas to compare: their number grows with the square of a oneOf, and again with every
level below.
"""
MOST_REFERENCES = 64
"""The most references that lead from one to the next."""
