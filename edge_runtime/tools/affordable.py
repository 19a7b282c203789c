"""Bounds what the grammar of many tools costs: schemas that are too large together are not all enforced.

Compiling takes a second or two for the tools of a coding agent. But a compiled grammar travels between
processes as text, in which xgrammar repeats the automaton of the whole grammar for each rule: that text grows
with the square of the places. docs/coding-agents.md has what was measured for 32 places and other bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

MOST_PLACES = 32
"""The most places of schemas that a grammar enforces for tools that are not strict."""
REPEATS = 64
"""Repetitions (`maxLength`, `maxItems`) that cost about as much as a place."""
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

Tool = Mapping[str, Any]


def affordable(tools: Seq[Tool]) -> tuple[Tool, ...]:
    """Return the tools as a grammar enforces them: the largest schemas of tools that are not `strict` become
    any object, until those left have at most MOST_PLACES places together. Strict tools are kept.
    """
    places = {at: _places(tool["function"].get("parameters")) for at, tool in enumerate(tools)}
    free = [at for at, tool in enumerate(tools) if tool["function"].get("strict") is not True]
    total = sum(places[at] for at in free)
    loosened = set[int]()
    for at in sorted(free, key=lambda at: (-places[at], at)):
        if total <= MOST_PLACES:
            break
        total -= places[at] - 1
        loosened.add(at)
    return tuple(_loosened(tool) if at in loosened else tool for at, tool in enumerate(tools))


def is_any_object(tool: Tool) -> bool:
    """Whether a grammar lets the tool's arguments be any object."""
    return tool["function"].get("parameters") is ANY_OBJECT


def _loosened(tool: Tool) -> Tool:
    return {**tool, "function": {**tool["function"], "parameters": ANY_OBJECT}}


def _places(schema: Any) -> int:
    """About the number of places that masks are stored for: one for each object in a schema, and more where
    something is repeated up to a number.
    """
    if isinstance(schema, Mapping):
        most = (schema.get(name) for name in ("maxLength", "maxItems"))
        repeats = sum(value for value in most if isinstance(value, int)) // REPEATS
        return 1 + repeats + _sum(schema.values())
    return _sum(schema) if isinstance(schema, list) else 0


def _sum(values: Iterable[Any]) -> int:
    return sum(map(_places, values))
