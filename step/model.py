"""The result of a model file: the facts that a runtime needs, and the model's step."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nearfar.step.config import LARGEST
from nearfar.step.operation import Op, weights_of
from nearfar.step.ops import OPS, Embedding, Logits
from nearfar.step.params import Param, RotaryOrder, TensorPiece
from nearfar.step.rope import Rope
from nearfar.step.shapes import Parts

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = typing.TypeVar("T", bound="DataclassInstance")


STATE_STRIDE = 256
"""Positions of a column of states: as many as the largest step has rows, so that a step writes two pages of a
sequence at most. A page of a state is large (a megabyte a layer in Qwen 3.5).
"""


@dataclass(frozen=True, order=True)
class PageGroup:
    """Caches that share page numbers and a page table: their layers look equally far back.

    `window`: positions that the layers look at, the row's own included; None: all. `stride`: positions of a
    column of states; None: a column is a page of positions.
    """

    window: int | None = None
    stride: int | None = None


@dataclass(frozen=True)
class KvCache:
    """What one layer remembers: keys and values of every position, or of the last `window` ones if no layer
    looks further back; or one tensor; or a state of `depth` rows for each head (nearfar.step.shapes.Parts).
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    parts: Parts = "kv"
    depth: int = 0

    @property
    def group(self) -> PageGroup:
        """The group of the cache. A row reads the state behind the position before it, and writes its own:
        the window of a state is 2.
        """
        return PageGroup(2, STATE_STRIDE) if self.parts == "state" else PageGroup(self.window)


@dataclass(frozen=True)
class Step:
    """One step of a model: its operations in order, their weights in the order in which they are read, caches
    and tables.

    `spellings`: the pieces of some parameters in checkpoints that store them in other tensors; empty where
    the checkpoint is known (nearfar.step.reading).
    """

    ops: tuple[Op, ...]
    params: tuple[Param, ...]
    caches: tuple[KvCache, ...]
    ropes: Mapping[str, Rope]
    spellings: Mapping[str, tuple[TensorPiece, ...]] = field(default_factory=dict)

    @property
    def groups(self) -> tuple[PageGroup, ...]:
        """The groups of the caches: without a window first, then from the longest window to the shortest,
        then states.
        """
        found = {cache.group for cache in self.caches}
        return tuple(
            sorted(found, key=lambda g: (g.stride is not None, g.window is not None, -(g.window or 0)))
        )

    def group(self, cache: int) -> int:
        """The number of the group of a cache."""
        return self.groups.index(self.caches[cache].group)


@dataclass(frozen=True)
class Model:
    """A model as it runs. `architecture` is for people; runtimes compute from the step alone.

    `unused`: tensors that a checkpoint may have and that nothing reads.
    """

    architecture: str
    vocab_size: int
    context_length: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    step: Step
    unused: tuple[str, ...] = ()

    @property
    def embedding(self) -> int | None:
        """The width of the model's embeddings; None if it gives logits."""
        end = self.step.ops[-1]
        return end.width if isinstance(end, Embedding) else None

    def embedding_last(self) -> Model:
        """The model that gives embeddings, the input of its head, instead of logits; weights that only the
        head used are dropped.
        """
        *body, end = self.step.ops
        assert isinstance(end, Logits)
        params = {param.name: param for param in self.step.params}
        ops = (*body, Embedding("embedding", end.x, params[end.weight].k))
        read = {name for op in ops for name in weights_of(op)}
        dropped = [param for param in self.step.params if param.name not in read]
        kept = tuple(param for param in self.step.params if param.name in read)
        unused = tuple(piece.tensor for param in dropped for piece in param.pieces)
        return replace(self, step=replace(self.step, ops=ops, params=kept), unused=(*self.unused, *unused))

    def renamed(self, name: Callable[[str], str]) -> Model:
        """The model with each tensor renamed by `name`."""

        def renamed(pieces: Iterable[TensorPiece]) -> tuple[TensorPiece, ...]:
            return tuple(replace(piece, tensor=name(piece.tensor)) for piece in pieces)

        params = tuple(replace(param, pieces=renamed(param.pieces)) for param in self.step.params)
        spellings = {of: renamed(pieces) for of, pieces in self.step.spellings.items()}
        step = replace(self.step, params=params, spellings=spellings)
        return replace(self, step=step, unused=tuple(map(name, self.unused)))

    def ending_in(self, eos: tuple[int, ...]) -> Model:
        """The model with other end-of-sequence tokens."""
        return replace(self, eos_token_ids=eos)


def op_record(op: Op) -> dict[str, Any]:
    """An operation as JSON: its name, and the fields that differ from their defaults."""
    fields = {f.name: getattr(op, f.name) for f in dataclasses.fields(op) if getattr(op, f.name) != f.default}
    return {"op": op.op, **fields}


def op_of(record: Mapping[str, Any]) -> Op:
    """Read what `op_record` wrote; ValueError for an unknown operation or field, or a field of
    another type.
    """
    kind = OPS.get(str(record.get("op")))
    if kind is None:
        raise ValueError(f"operation {str(record.get('op'))[:80]!r} is not known")
    fields = {key: value for key, value in record.items() if key != "op"}
    return _record(kind, fields, f"operation {kind.op}")


def param_record(param: Param) -> dict[str, Any]:
    """A parameter as JSON: its pieces of tensors, and the factor and offset folded into it."""
    pieces = []
    for piece in param.pieces:
        record: dict[str, Any] = {"tensor": piece.tensor, "rows": piece.rows}
        if piece.start:
            record["start"] = piece.start
        if piece.order is not None and not piece.order.trivial:
            record["order"] = dataclasses.asdict(piece.order)
        record |= {"stack": piece.stack} if piece.stack else {}
        record |= {"transposed": True} if piece.transposed else {}
        record |= {"scale": piece.scale} if piece.scale != 1.0 else {}
        pieces.append(record)
    record = {"name": param.name, "pieces": pieces}
    record |= {"k": param.k} if param.is_matrix else {}
    record |= {"offset": param.offset} if param.offset else {}
    record |= {"stack": param.stack} if param.stack != 1 else {}
    record |= {"floats": True} if param.floats else {}
    return record | ({"scale": param.scale} if param.scale != 1.0 else {})


def param_of(record: Mapping[str, Any]) -> Param:
    """Read what `param_record` wrote; ValueError if it is not a parameter."""
    pieces = record.get("pieces")
    if not isinstance(pieces, list) or not pieces or not all(isinstance(piece, Mapping) for piece in pieces):
        raise ValueError(f"parameter {str(record.get('name'))[:80]!r} has no list of pieces")
    made = _record(Param, {**record, "pieces": ()}, "parameter")
    return replace(made, pieces=tuple(_piece(piece) for piece in pieces))


def _piece(record: Mapping[str, Any]) -> TensorPiece:
    order = record.get("order")
    if order is not None and not isinstance(order, Mapping):
        raise ValueError(f"order of {str(record.get('tensor'))[:80]!r} is {str(order)[:80]!r}")
    piece = _record(TensorPiece, {**record, "order": None}, "piece")
    found = None if order is None else _record(RotaryOrder, order, "order")
    if found is not None and (
        found.rotary % 2 or not 0 < found.rotary <= found.head_dim or piece.rows % found.head_dim
    ):
        raise ValueError(f"order of {piece.tensor!r} does not fit its {piece.rows} rows: {str(order)[:80]}")
    return replace(piece, order=found)


def _record(kind: type[T], record: Mapping[str, Any], what: str) -> T:
    """A record whose fields have been checked; ValueError for an unknown or missing field, or
    another type.
    """
    fields = {f.name: f for f in dataclasses.fields(kind)}
    if unknown := record.keys() - fields.keys():
        raise ValueError(f"{what} has no {min(unknown)!r}")
    hints = field_types(typing.cast(type, kind))
    given = {key: value for key, value in record.items() if value is not None and value != ()}
    values = {key: _typed(hints[key], value, f"{what}.{key}") for key, value in given.items()}
    required = [name for name, f in fields.items() if f.default is dataclasses.MISSING and name != "pieces"]
    if missing := [name for name in required if name not in values]:
        raise ValueError(f"{what} lacks {missing[0]!r}")
    return kind(**values, **({"pieces": ()} if "pieces" in fields else {}))


@functools.cache
def field_types(kind: type) -> dict[str, Any]:
    """The types of a record's fields, looked up once for each kind: a list has thousands of records."""
    return typing.get_type_hints(kind)


def _typed(hint: Any, value: Any, where: str) -> Any:
    """A JSON value as the type of a field; ValueError if it is of another type."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(each for each in typing.get_args(hint) if each is not types.NoneType)
    if typing.get_origin(hint) is typing.Literal:
        fits = value in typing.get_args(hint)
    elif typing.get_origin(hint) is tuple:
        numbers = isinstance(value, list | tuple) and all(type(item) in (int, float) for item in value)
        fits = numbers and len(value) == 2
        value = tuple(float(item) for item in value) if fits else value
    elif hint is float:
        fits = type(value) in (int, float)
        value = float(value) if fits else value
    elif hint is int:
        fits = type(value) is int and 0 <= value <= LARGEST
    else:
        fits = type(value) is hint
    if not fits:
        raise ValueError(f"{where} is {str(value)[:80]!r}")
    return value
