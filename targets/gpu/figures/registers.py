"""Registers that a thread's variables need at once: liveness over a lowered kernel, in which loops of known
length are unrolled and subexpressions have names.

Elements of an array at known indices are variables of their own (a register for each 4 bytes; float16 of a
vector in pairs). An array with an unknown index is held as a whole, from its first use to its last.
Temporaries within an expression do not count, nor does anything that a compiler moves ahead of its use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from tvm import tirx

_BELOW: dict[str, tuple[str, ...]] = {
    "Cast": ("value",), "Not": ("a",), "BitwiseNot": ("a",), "Broadcast": ("value",), "Call": ("args",),
    "Ramp": ("base", "stride"), "Select": ("condition", "true_value", "false_value"),
    "Let": ("value", "body"), "TensorLoad": ("indices",), "Shuffle": ("vectors",), "IntImm": (),
    "FloatImm": (), "StringImm": (), "Var": (),
}  # fmt: skip
_PAIR = ("a", "b")
_LISTS = frozenset({"args", "indices", "vectors"})


@dataclass
class _Statement:
    """The variables that a statement reads and writes; for a loop, the variable of its turns. Loops and
    conditions contain further statements, which run after their own reads.
    """

    reads: set[int] = field(default_factory=set)
    makes: int | None = None
    ways: tuple[list[_Statement], ...] = ()
    loops: bool = False


def registers(func: tirx.PrimFunc) -> int:
    """The most 4-byte registers that are live at any place."""
    reading = _Reading()
    return math.ceil(_Liveness(reading.size, reading.whole).most(reading.block(func.body)))


class _Liveness:
    """Liveness from the last statement backward. `size`: registers of each variable; `whole`: variables of
    whole arrays, of which a store leaves other elements live.
    """

    def __init__(self, size: list[float], whole: set[int]) -> None:
        self._size, self._whole = size, whole
        self._most = 0.0

    def most(self, program: list[_Statement]) -> float:
        """The most registers that are live at once."""
        self._before(program, set())
        return self._most

    def _before(self, statements: list[_Statement], after: set[int]) -> set[int]:
        """The variables that are live before statements, from those live after them."""
        live = set(after)
        held = sum(self._size[variable] for variable in live)
        for statement in reversed(statements):
            if statement.ways:
                live = (statement.reads | self._around(statement, live)) - {statement.makes}
                held = sum(self._size[variable] for variable in live)
            else:
                made = statement.makes
                if made is not None and made not in live:
                    self._most = max(self._most, held + self._size[made])
                elif made is not None and made not in self._whole:
                    live.remove(made)
                    held -= self._size[made]
                for variable in statement.reads - live:
                    live.add(variable)
                    held += self._size[variable]
            self._most = max(self._most, held)
        return live

    def _around(self, statement: _Statement, after: set[int]) -> set[int]:
        """The variables that are live before a loop or a condition. Those that a turn needs from the turn
        before are live all around the loop.
        """
        if not statement.loops:
            return set().union(*(self._before(way, after) for way in statement.ways))
        live = after | statement.reads
        while True:
            more = live | self._before(statement.ways[0], live)
            if more == live:
                return live
            live = more


class _Reading:
    """A function as statements over numbered variables."""

    def __init__(self) -> None:
        self.size: list[float] = []
        self.whole: set[int] = set()
        self._variables: dict[Any, int] = {}
        self._elements: dict[tuple[int, int], int] = {}
        self._arrays: dict[Any, tuple[int, float, int]] = {}

    def block(self, node: Any) -> list[_Statement]:
        """The statements below a node."""
        kind = type(node).__name__
        if kind == "SeqStmt":
            self._allocations(node)
            return [statement for child in node.seq for statement in self.block(child)]
        if kind == "AttrStmt":
            return self.block(node.body)
        if kind == "For":
            reads = self._reads(node.extent)
            turn = self._variables[node.loop_var] = self._new(1)
            return [_Statement(reads, turn, (self.block(node.body),), loops=True)]
        if kind == "While":
            return [_Statement(self._reads(node.condition), None, (self.block(node.body),), loops=True)]
        if kind == "IfThenElse":
            otherwise = [] if node.else_case is None else self.block(node.else_case)
            return [_Statement(self._reads(node.condition), None, (self.block(node.then_case), otherwise))]
        if kind == "Bind":
            reads = self._reads(node.value)
            made = self._variables[node.var] = self._new(_registers(node.value.ty.dtype))
            return [_Statement(reads, made)]
        if kind == "BufferStore":
            reads = self._reads(node.value) | self._reads(node.indices[0])
            return [_Statement(reads, self._element(node.buffer, node.indices[0]))]
        return [_Statement(self._reads(node.value))] if kind == "Evaluate" else []

    def _new(self, size: float) -> int:
        self.size.append(size)
        return len(self.size) - 1

    def _allocations(self, node: Any) -> None:
        """Record a thread's own arrays: registers of the whole array, and of an element."""
        for child in node.seq:
            if type(child).__name__ == "AllocBuffer" and str(child.buffer.scope()) == "local":
                count = math.prod(int(extent) for extent in child.buffer.shape)
                each = _registers(child.buffer.dtype)
                self._arrays[child.buffer] = (len(self._arrays), each, self._new(each * count))

    def _element(self, buffer: Any, index: Any) -> int | None:
        """The variable that an access names; None if the memory is not the thread's own."""
        found = self._arrays.get(buffer)
        if found is None:
            return None
        array, each, whole = found
        if not isinstance(index, tirx.IntImm):
            self.whole.add(whole)
            return whole
        place = (array, int(index.value))
        if place not in self._elements:
            self._elements[place] = self._new(each)
        return self._elements[place]

    def _reads(self, expr: Any) -> set[int]:
        """Variables that an expression reads."""
        found: set[int] = set()
        pending = [expr]
        while pending:
            node = pending.pop()
            kind = type(node).__name__
            variable = None
            if kind == "Var":
                variable = self._variables.get(node)
            elif kind == "TensorLoad":
                variable = self._element(node.source, node.indices[0])
            if variable is not None:
                found.add(variable)
            for below in _BELOW.get(kind, _PAIR):
                child = getattr(node, below)
                pending += list(child) if below in _LISTS else [child]
        return found


def _registers(dtype: Any) -> float:
    text = str(dtype)
    base, _, lanes = text.partition("x")
    bits = int(base.lstrip("abcdefghijklmnopqrstuvwxyz") or 32)
    return max(1.0, bits * int(lanes or 1) / 32)
