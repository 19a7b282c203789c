"""Replays the operations of tests/vectors/cache on the Python bookkeeping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nearfar.edge_runtime.cache import SequenceTable

VECTORS = Path(__file__).parents[1] / "vectors" / "cache"


def apply(table: SequenceTable, op: str, args: dict[str, Any]) -> dict[str, Any] | None:
    """Run one operation; the result as the vectors write it."""
    if op == "open":
        opened = table.open(args["tokens"])
        return None if opened is None else {"slot": opened.slot, "cached": len(opened.tokens)}
    if op == "clear":
        return {"evicted": table.clear()}
    sequence = table.sequences[args["slot"]]
    match op:
        case "reserve":
            copies = table.reserve(sequence, args["length"])
            return None if copies is None else {"copies": [list(copy) for copy in copies]}
        case "append":
            table.append(sequence, args["tokens"])
            table.publish(sequence, len(sequence.tokens))
        case "fork":
            child = table.fork(sequence)
            return None if child is None else {"slot": child.slot}
        case "truncate":
            table.truncate(sequence, args["length"])
        case "release":
            table.release(sequence)
        case _:
            raise ValueError(f"unknown operation {op}")
    return {}


def state(table: SequenceTable) -> dict[str, Any]:
    """The whole state as the vectors write it."""
    return {
        "free": table.allocator.free_pages(),
        "refs": list(table.allocator.refs),
        "index": [[page, parent, tokens] for page, parent, tokens in table.index.entries()],
        "idle": table.index.idle_pages(),
        "sequences": [
            {"slot": slot, "tokens": list(s.tokens), "pages": list(s.pages)}
            for slot, s in sorted(table.sequences.items())
        ],
    }
