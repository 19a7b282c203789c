"""The form of an operation's record: what its fields name, and what every reader may ask about it.

The types of a record's fields say which values, weights, caches and rotations it names, `out_width` gives the
width of its result, and `problems` finds what does not fit. So `reads`, `weights_of`, the builder and the
check of a manifest need no code for a new operation.
"""

from __future__ import annotations

import functools
import typing
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, ClassVar, Literal

from nearfar.step.shapes import Shapes


class Role(Enum):
    """The kind of thing that a field of a record names."""

    INPUT = "a value that an operation before it makes"
    MATRIX = "a parameter [n, k] that x [M, k] is multiplied by"
    LOOKUP = "a parameter [n, k] whose rows are looked up"
    STACK = "a parameter of stacked matrices, each [n, k], of which every row chooses some"
    VECTOR = "a parameter of one dimension, float32"
    CACHE = "the number of a cache"
    ROTATION = "a table of rotations"


Input = Annotated[str, Role.INPUT]
Matrix = Annotated[str, Role.MATRIX]
Lookup = Annotated[str, Role.LOOKUP]
Stack = Annotated[str, Role.STACK]
Vector = Annotated[str, Role.VECTOR]
Cache = Annotated[int, Role.CACHE]
Rotation = Annotated[str, Role.ROTATION]

Activation = Literal["silu", "gelu_tanh", "gelu_erf", "relu2", "sigmoid"]
"""silu: x·σ(x). gelu_tanh, gelu_erf: the GELU (Hendrycks & Gimpel, 2016) by tanh, or exactly. relu2:
max(x, 0)². sigmoid: σ(x) = 1 / (1 + e⁻ˣ).
"""
Score = Literal["softmax", "sigmoid"]
"""How a router's logits become weights: by a softmax over all experts, or each by itself as σ(x)."""


@dataclass(frozen=True)
class Op(ABC):
    """One operation of a step. `op`: its name in a manifest."""

    op: ClassVar[str]
    half: ClassVar[bool] = False
    """Whether the operation can read values of the target's activation dtype.

    Other operations read float32, so that the residual stream, and whatever is normalized on its way there,
    keeps its range (docs/decisions/0003).
    """
    ends: ClassVar[bool] = False
    """Whether the operation ends a list; it then reads only the rows that `logit_rows` names."""
    out: str

    @abstractmethod
    def out_width(self, of: Shapes) -> int:
        """Columns of `out`."""

    def problems(self, of: Shapes) -> Iterator[str]:
        """Reasons why the operation does not fit, each the end of a sentence that begins with the operation.

        `of` must know every name in the record.
        """
        yield from ()


def reads(op: Op) -> tuple[str, ...]:
    """The values that an operation reads."""
    return _named(op, Role.INPUT)


def weights_of(op: Op) -> tuple[str, ...]:
    """The parameters that an operation reads."""
    return _named(op, Role.MATRIX, Role.LOOKUP, Role.STACK, Role.VECTOR)


def multiplied_by(op: Op) -> tuple[str, ...]:
    """The matrices that an operation multiplies its rows by."""
    return _named(op, Role.MATRIX)


def chosen_from(op: Op) -> tuple[str, ...]:
    """The stacks of matrices of which each row of an operation chooses some."""
    return _named(op, Role.STACK)


def looked_up_in(op: Op) -> tuple[str, ...]:
    """The matrices from which an operation reads the rows that tokens name."""
    return _named(op, Role.LOOKUP)


def caches_of(op: Op) -> tuple[int, ...]:
    """The caches that an operation writes or reads."""
    return tuple(int(getattr(op, name)) for name in _fields(type(op), (Role.CACHE,)))


def turned_by(op: Op) -> tuple[str, ...]:
    """The tables of rotations that an operation uses."""
    return _named(op, Role.ROTATION)


def problems_of(op: Op, of: Shapes) -> list[str]:
    """What is wrong with an operation: missing names, or shapes that do not fit; each the end of a
    sentence.
    """
    found = [f"reads {name}, which nothing before it makes" for name in reads(op) if name not in of.widths]
    for name in weights_of(op):
        if name not in of.params:
            found.append(f"names the weight {name!r}, which is not a parameter")
    found += [
        f"uses cache {cache}, there are {len(of.caches)}"
        for cache in caches_of(op)
        if not 0 <= cache < len(of.caches)
    ]
    found += [
        f"turns by {name!r}, which is not among ropes" for name in turned_by(op) if name not in of.ropes
    ]
    return found or list(_misshapen(op, of)) or list(op.problems(of))


def _misshapen(op: Op, of: Shapes) -> Iterator[str]:
    """Complaints about vectors where a matrix is needed, and matrices where a vector is needed."""
    vectors = _named(op, Role.VECTOR)
    for name in weights_of(op):
        if of.params[name].is_matrix == (name in vectors):
            yield f"takes {name} for a {'vector' if name in vectors else 'matrix'}, which it is not"


def _named(op: Op, *roles: Role) -> tuple[str, ...]:
    """The names in the fields of these roles, without None."""
    return tuple(name for name in (getattr(op, f) for f in _fields(type(op), roles)) if name is not None)


@functools.cache
def _fields(kind: type[Op], roles: tuple[Role, ...]) -> tuple[str, ...]:
    """The names of the fields that have one of these roles, in order."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return tuple(name for name, hint in hints.items() if _role(hint) in roles)


def _role(hint: object) -> Role | None:
    """The role in a field's type, `Vector` or `Vector | None`; None if it has none."""
    for each in (hint, *typing.get_args(hint)):
        for more in getattr(each, "__metadata__", ()):
            if isinstance(more, Role):
                return more
    return None
