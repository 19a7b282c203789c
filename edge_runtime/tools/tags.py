"""Constructors for the parts of a structural tag."""

from __future__ import annotations

from typing import Any

Tag = dict[str, Any]

NOTHING: Tag = {"type": "grammar", "grammar": 'root ::= ""'}
"""The empty text; a `const_string` may not be empty."""


def constant(text: str) -> Tag:
    """A fixed text."""
    return {"type": "const_string", "value": text}


def tag(begin: str, content: Tag, end: str) -> Tag:
    """A tag: the content between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def either(*parts: Tag) -> Tag:
    """Alternatives: one of the parts."""
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": list(parts)}


def repeated(tags: list[Tag], separator: str, least: int = 1) -> Tag:
    """One of the tags, or several with a separator; also none if `least` is 0."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": least > 0,
    }


def in_order(*parts: Tag) -> Tag:
    """All parts in order."""
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": list(parts)}
