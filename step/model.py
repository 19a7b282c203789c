"""What a model file gives: the facts that a runtime needs of a model, and its step."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nearfar.step.ops import OPS, Attend, Op
from nearfar.step.params import Param, Piece, RotaryOrder
from nearfar.step.rope import Rope


@dataclass(frozen=True)
class KvCache:
    """Keys and values of one layer, for every position, or where nobody looks further back for the last `window`."""

    kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True)
class Step:
    """One step of a model: its operations in order, their weights in the order in which they are read, caches, tables."""

    ops: tuple[Op, ...]
    params: tuple[Param, ...]
    caches: tuple[KvCache, ...]
    ropes: Mapping[str, Rope]

    def heads(self, cache: int) -> int:
        """Query heads of the layer that attends to a cache."""
        return next(op.heads for op in self.ops if isinstance(op, Attend) and op.cache == cache)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The different windows of its caches, one a group of caches: without a window first, then the shortest last."""
        found = {cache.window for cache in self.caches}
        return tuple(sorted(found, key=lambda window: (window is not None, -(window or 0))))

    def group(self, cache: int) -> int:
        """The group of a cache: those with the same window share pages' numbers and a page table."""
        return self.windows.index(self.caches[cache].window)


@dataclass(frozen=True)
class Model:
    """A model as it runs. `architecture` is for people; all that a runtime computes with is in the step.

    `unused`: tensors that a checkpoint may have, but that nothing reads.
    """

    architecture: str
    vocab_size: int
    context_length: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    step: Step
    unused: tuple[str, ...] = ()

    def ending_in(self, eos: tuple[int, ...]) -> Model:
        """With other end tokens."""
        return replace(self, eos_token_ids=eos)


def op_record(op: Op) -> dict[str, Any]:
    """An operation as JSON: its name, and the fields that differ from their defaults."""
    fields = {f.name: getattr(op, f.name) for f in dataclasses.fields(op) if getattr(op, f.name) != f.default}
    return {"op": op.op, **fields}


def op_of(record: Mapping[str, Any]) -> Op:
    """The reverse; ValueError for an operation, or a field, that is not known."""
    kind = OPS.get(str(record.get("op")))
    if kind is None:
        raise ValueError(f"operation {record.get('op')!r} is not known")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    if unknown := record.keys() - fields.keys() - {"op"}:
        raise ValueError(f"operation {kind.op} has no {min(unknown)!r}")
    hints = typing.get_type_hints(kind)
    values = {key: _typed(hints[key], value) for key, value in record.items() if key != "op"}
    if missing := [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in values]:
        raise ValueError(f"operation {kind.op} lacks {missing[0]!r}")
    return kind(**values)


def param_record(param: Param) -> dict[str, Any]:
    """A parameter as JSON: what its tensors are, and what is folded into it."""
    pieces = []
    for piece in param.pieces:
        record: dict[str, Any] = {"tensor": piece.tensor, "rows": piece.rows}
        if piece.start:
            record["start"] = piece.start
        if piece.order is not None and not piece.order.trivial:
            record["order"] = dataclasses.asdict(piece.order)
        pieces.append(record)
    record = {"name": param.name, "pieces": pieces}
    record |= {"k": param.k} if param.is_matrix else {}
    record |= {"offset": param.offset} if param.offset else {}
    return record | ({"scale": param.scale} if param.scale != 1.0 else {})


def param_of(record: Mapping[str, Any]) -> Param:
    """The reverse."""
    pieces = tuple(
        Piece(p["tensor"], p["rows"], p.get("start", 0), RotaryOrder(**p["order"]) if "order" in p else None)
        for p in record["pieces"]
    )
    return Param(
        record["name"], pieces, record.get("k", 0), float(record.get("offset", 0.0)), float(record.get("scale", 1.0))
    )


def _typed(hint: Any, value: Any) -> Any:
    """JSON's value as the field's type: lists are tuples, whole numbers can be floats."""
    if isinstance(value, list):
        return tuple(float(item) for item in value)
    return float(value) if type(value) is int and (hint is float or hint == float | None) else value
