"""Finds the uses of a function's buffers before code is written: TVM 0.27 has no visitor for Python."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tvm.ir import Call, TensorLoad, Var
from tvm.sym import Analyzer
from tvm.tirx import Add, Bind, BufferStore, IntImm, Ramp
from tvm_ffi import structural_hash

MAX_SCALARS = 512
"""The most elements of an array that becomes variables; no register file holds more."""

# The fields of each kind of node that hold expressions and statements. A kind that is not listed has none.
_FIELDS: dict[str, tuple[str, ...]] = {
    "SeqStmt": ("seq",), "AttrStmt": ("value", "body"), "For": ("min", "extent", "body"),
    "While": ("condition", "body"), "IfThenElse": ("condition", "then_case", "else_case"),
    "Evaluate": ("value",), "Bind": ("value",), "BufferStore": ("value", "indices"),
    "AssertStmt": ("condition",), "TensorLoad": ("indices",), "Call": ("args",), "Cast": ("value",),
    "Not": ("a",), "BitwiseNot": ("a",), "Select": ("condition", "true_value", "false_value"),
    "Ramp": ("base", "stride"), "Broadcast": ("value",), "Shuffle": ("vectors", "indices"),
    "Let": ("value", "body"),
}  # fmt: skip
_PAIR = ("a", "b")
_PAIRS = frozenset({
    "Add", "Sub", "Mul", "Div", "Mod", "FloorDiv", "FloorMod", "Min", "Max", "EQ", "NE", "LT", "LE", "GT",
    "GE", "And", "Or", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "LShift", "RShift",
})  # fmt: skip


def children(node: Any) -> Iterator[Any]:
    """The nodes right below."""
    name = type(node).__name__
    for field_name in _PAIR if name in _PAIRS else _FIELDS.get(name, ()):
        child = getattr(node, field_name)
        if child is None:
            continue
        if field_name in ("seq", "args", "indices", "vectors"):
            yield from child
        else:
            yield child


def nodes(root: Any) -> Iterator[Any]:
    """The node and all below it, in the order of the program."""
    pending = [root]
    while pending:
        node = pending.pop()
        yield node
        pending += reversed(list(children(node)))


@dataclass
class Uses:
    """The uses of a buffer. `vector`: lanes of its accesses, if all are whole, aligned vectors; else 1."""

    loaded: bool = False
    stored: bool = False
    constant: bool = True
    highest: int = -1
    vector: int | None = None
    offsets: dict[int, set[int]] = field(default_factory=dict)

    @property
    def quads(self) -> bool:
        """Whether aligned groups of four neighbours are loaded. Offsets are by the index that they are added
        to.
        """
        return any(
            {i, i + 1, i + 2, i + 3} <= found for found in self.offsets.values() for i in found if i % 4 == 0
        )

    def add_load(self, index: Any, analyzer: Analyzer, width: int = 1) -> None:
        """Add a load, with its offset from its neighbours."""
        self.add(index, analyzer, width)
        base, offset = (index.a, index.b) if isinstance(index, Add) else (index, 0)
        if isinstance(index, IntImm):
            self.offsets.setdefault(0, set()).add(int(index.value))
        elif isinstance(offset, int | IntImm) and not isinstance(index, Ramp):
            modulus = analyzer.modular_set(base)
            if int(modulus.coeff) % 4 == 0 and int(modulus.base) % 4 == 0:
                self.offsets.setdefault(structural_hash(base, map_free_vars=False), set()).add(
                    int(getattr(offset, "value", offset))
                )

    def add(self, index: Any, analyzer: Analyzer, width: int = 1) -> None:
        """Add an access; it has `width` numbers in a buffer of vectors."""
        last = _last(index)
        if last is None:
            self.constant = False
        else:
            self.highest = max(self.highest, (last + 1) * width - 1)
        lanes = width if width > 1 else _lanes(index, analyzer)
        self.vector = lanes if self.vector in (None, lanes) else 1

    @property
    def scalars(self) -> bool:
        """Whether separate variables can replace an array."""
        return self.constant and self.highest < MAX_SCALARS


def _last(index: Any) -> int | None:
    """The highest element of an access, if it is known."""
    if isinstance(index, IntImm):
        return int(index.value)
    if isinstance(index, Ramp) and isinstance(index.base, IntImm) and isinstance(index.stride, IntImm):
        return int(index.base.value) + (int(index.lanes) - 1) * max(int(index.stride.value), 0)
    return None


def _lanes(index: Any, analyzer: Analyzer) -> int:
    """Lanes of an access that can be a SPIR-V vector: neighbours that begin at a multiple of 2 or
    4; else 1.
    """
    if not isinstance(index, Ramp) or not isinstance(index.stride, IntImm) or int(index.stride.value) != 1:
        return 1
    lanes = int(index.lanes)
    if lanes not in (2, 4):
        return 1
    modulus = analyzer.modular_set(index.base)
    return lanes if int(modulus.coeff) % lanes == 0 and int(modulus.base) % lanes == 0 else 1


def uses(root: Any) -> dict[Var, Uses]:
    """The uses of each buffer under a node, in the order of their first appearance."""
    out: dict[Var, Uses] = {}
    analyzer = Analyzer()
    for node in nodes(root):
        if isinstance(node, TensorLoad):
            found = out.setdefault(node.source, Uses())
            found.loaded = True
            note = found.add_load if str(node.source.scope()) == "shared" else found.add
            for index in node.indices:
                note(index, analyzer, width_of(node.source))
        elif isinstance(node, BufferStore):
            found = out.setdefault(node.buffer, Uses())
            found.stored = True
            for index in node.indices:
                found.add(index, analyzer, width_of(node.buffer))
        elif isinstance(node, Bind):
            analyzer.bind(node.var, node.value)
    return out


def width_of(buffer: Var) -> int:
    """Numbers in an element: 4 in a buffer of `uint32x4`."""
    return int(buffer.dtype.lanes)


Stored = set[tuple[Var, int | None]]
"""Pairs of a buffer and the number in it that is stored to; None if that is not known."""


def stored(root: Any) -> Stored:
    """The stores under a node."""
    stores = [node for node in nodes(root) if isinstance(node, BufferStore)]
    return {
        (node.buffer, int(i.value) * width_of(node.buffer) + lane if isinstance(i, IntImm) else None)
        for node in stores
        for i in node.indices
        for lane in range(width_of(node.buffer))
    }


def cheap(root: Any) -> bool:
    """Whether an expression may be computed even if its value is not needed: it contains no load, call or
    division.
    """
    return not any(
        isinstance(node, TensorLoad | Call) or type(node).__name__ in _UNSAFE for node in nodes(root)
    )


_UNSAFE = frozenset({"Div", "Mod", "FloorDiv", "FloorMod", "Let"})
