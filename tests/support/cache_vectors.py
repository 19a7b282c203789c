"""Replays the operations of tests/vectors/cache on the Python bookkeeping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nearfar.edge_runtime.cache import SequenceTable
from nearfar.edge_runtime.cache.prefix import Node

VECTORS = Path(__file__).parents[1] / "vectors" / "cache"


def table(config: dict[str, Any]) -> SequenceTable:
    """The empty table that a vector starts with."""
    return SequenceTable(**config)


def apply(table: SequenceTable, op: str, args: dict[str, Any]) -> dict[str, Any] | None:
    """Run one operation; gives the result in the form of the vectors."""
    if op == "open":
        opened = table.open(args["tokens"])
        return None if opened is None else {"slot": opened.slot, "cached": len(opened.tokens)}
    if op == "clear":
        return {"evicted": table.clear()}
    if op == "borders":
        return {
            "border": table.border(args["length"]),
            "leaves": table.leaves(args["length"], args["common"]),
        }
    sequence = table.sequences[args["slot"]]
    match op:
        case "reserve":
            copies = table.reserve(sequence, args["length"], args.get("soon"))
            return None if copies is None else {"copies": [_copy(table, copy) for copy in copies]}
        case "append":
            table.append(sequence, args["tokens"])
            table.publish(sequence, len(sequence.tokens))
        case "fork":
            child = table.fork(sequence, args.get("length"))
            return None if child is None else {"slot": child.slot}
        case "shareable":
            return {"length": table.shareable(sequence, args["length"])}
        case "truncate":
            table.truncate(sequence, args["length"])
        case "advance":
            table.advance(sequence, args["length"])
        case "keep":
            table.keep(sequence)
        case "release":
            table.release(sequence)
        case _:
            raise ValueError(f"unknown operation {op}")
    return {}


def state(table: SequenceTable) -> dict[str, Any]:
    """The whole state in the form of the vectors: flat for one group without a window, else group
    by group.
    """
    if _plain(table):
        group = _group(table, 0)
        return {
            "free": group["free"],
            "refs": group["refs"],
            "index": sorted(_entry(node) for _, _, node in table.index.nodes()),
            "idle": group["idle"],
            "sequences": [
                {"slot": slot, "tokens": list(s.tokens), "pages": list(s.pages)}
                for slot, s in sorted(table.sequences.items())
            ],
        }
    return {
        "groups": [_group(table, group) for group in range(len(table.windows))],
        "index": [
            [list(path), list(node.pages)]
            for _, path, node in sorted(table.index.nodes(), key=lambda n: n[1])
        ],
        "sequences": [
            {
                "slot": slot,
                "tokens": len(s.tokens),
                "held": [[held.first, list(held.pages)] for held in s.held],
            }
            for slot, s in sorted(table.sequences.items())
        ],
    }


def _plain(table: SequenceTable) -> bool:
    return [window.size for window in table.windows] == [None]


def _copy(table: SequenceTable, copy: tuple[int, int, int]) -> list[int]:
    return list(copy[1:] if _plain(table) else copy)


def _group(table: SequenceTable, group: int) -> dict[str, Any]:
    return {
        "free": table.allocators[group].free_pages(),
        "refs": list(table.allocators[group].refs),
        "idle": table.index.idle_pages(group),
    }


def _entry(node: Node) -> list[Any]:
    """[page, page of the parent or -1, tokens] of a node of group 0."""
    assert node.parent is not None
    assert isinstance(node.key, tuple)
    parent = node.parent.pages[0]
    return [node.pages[0], -1 if parent is None else parent, list(node.key)]
