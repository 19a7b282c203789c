"""The keywords of JSON schemas that answers keep to: one table for the grammars of Python and of browsers."""

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
"""Keywords that forbid nothing, or (nullable) only allow more than is written."""
STRUCTURE = ("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions")
"""Keywords that speak of every type."""
DEFINITIONS = ("$defs", "definitions")
"""Keywords that name schemas for other schemas to refer to."""
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
"""Keywords that are kept to, by the type that they speak of. All others but ANNOTATIONS and STRUCTURE are
not.
"""
TYPES = ("string", "number", "integer", "object", "array", "boolean", "null")
"""What `type` can say."""
MOST_COMPARED = 20_000
"""Pairs of schemas: their number grows with the square of a oneOf, and again with every level below."""
MOST_STEPS = 64
"""The most steps of a reference through other references."""
