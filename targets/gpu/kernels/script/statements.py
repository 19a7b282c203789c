"""What a kernel's script builds the kernel with: parser.py makes its statements calls of these functions.

They write to TVM's IRBuilder, where the functions that kernels call write too. As in TVM's parser a
comparison of what is known is Python's, and one of an expression a node that nothing simplifies yet.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tvm import ir, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder.ir import meta_var
from tvm.tirx.expr import ExprOp
from tvm.tirx.script import builder

_COMPARED: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "Eq": (operator.eq, tirx.EQ), "NotEq": (operator.ne, tirx.NE), "Lt": (operator.lt, tirx.LT),
    "LtE": (operator.le, tirx.LE), "Gt": (operator.gt, tirx.GT), "GtE": (operator.ge, tirx.GE),
}  # fmt: skip
"""By its name in `ast`: of values, and of expressions."""


def parameter(name: str, kind: Any) -> Any:
    """A parameter of the kernel, of what its annotation says."""
    return builder.arg(name, kind if isinstance(kind, ir.Expr) else kind())


def loop(frame: Any) -> Any:
    """A loop, to be entered."""
    if not isinstance(frame, builder.frame.ForFrame):
        raise TypeError(f"a kernel loops over T.serial, T.unroll or T.thread_binding, not over {frame!r}")
    return frame


def named(name: str, variable: Any) -> None:
    """The variable of a loop has the name that the script gives it."""
    IRBuilder.name(name, variable)


class Branch:
    """Both branches of an `if` that the kernel decides when it is run."""

    holds = fails = True
    then, otherwise = staticmethod(builder.Then), staticmethod(builder.Else)

    def __init__(self, test: Any) -> None:
        self.frame = builder.If(test)

    def __enter__(self) -> Branch:
        self.frame.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.frame.__exit__(*error)


class Known:
    """The branch that is left of an `if` that is decided when the kernel is made."""

    then = otherwise = staticmethod(nullcontext)

    def __init__(self, holds: bool) -> None:
        self.holds, self.fails = holds, not holds


_KNOWN = {holds: nullcontext(Known(holds)) for holds in (False, True)}


def branch(test: Any) -> AbstractContextManager[Branch | Known]:
    """The branches that there are."""
    if isinstance(test, bool):
        return _KNOWN[test]
    if not _is_expression(test):
        raise TypeError(f"a kernel decides by a truth value or an expression, not by {test!r}")
    return Branch(test)


def store(value: Any, places: Sequence[Any], array: Any) -> None:
    """A value to a place of an array."""
    builder.buffer_store(array, value, places)


def bind(name: str, value: Any) -> Any:
    """What `name = value` makes the name of: arrays and variables get it as theirs."""
    if isinstance(value, meta_var):
        return value.value
    if not isinstance(value, ir.Var) or value.name:
        raise TypeError(
            f"{name} = … names an array or a T.int32() that has no name; T.let names an expression, "
            f"T.meta_var anything: {value!r}"
        )
    IRBuilder.name(name, value)
    return value


def let(name: str, value: Any) -> Any:
    """A variable that the kernel computes once."""
    value = value if isinstance(value, ir.Expr) else tirx.const(value)
    variable = tirx.Var(name, value.ty)
    builder.Bind(value, var=variable)
    return variable


def evaluate(value: Any) -> None:
    """What a call gave that stands as a statement: nothing, where it wrote statements itself."""
    if value is not None:
        if not isinstance(value, ir.Call):
            raise TypeError(f"a call that stands alone gives nothing or is one of TVM's, not {value!r}")
        builder.evaluate(value)


def compared(kind: str, a: Any, b: Any) -> Any:
    """A comparison; numbers get the type of the expression that they are compared with."""
    of_values, of_expressions = _COMPARED[kind]
    if not (_is_expression(a) or _is_expression(b)):
        return of_values(a, b)
    return of_expressions(_alike(a, b), _alike(b, a))


def every(first: Callable[[], Any], *rest: Callable[[], Any]) -> Any:
    """`and`."""
    value = first()
    for more in rest:
        if not _is_expression(value) and not value:
            return value
        value = _joined(tirx.And, value, more())
    return value


def some(first: Callable[[], Any], *rest: Callable[[], Any]) -> Any:
    """`or`."""
    value = first()
    for more in rest:
        if not _is_expression(value) and value:
            return value
        value = _joined(tirx.Or, value, more())
    return value


def negated(value: Any) -> Any:
    """`not`."""
    return tirx.Not(value) if _is_expression(value) else not value


def chosen(test: Any, value: Callable[[], Any], other: Callable[[], Any]) -> Any:
    """`value if test else other`."""
    if isinstance(test, bool):
        return value() if test else other()
    return tirx.if_then_else(test, value(), other())


def _joined(node: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """Two truth values, of which the first does not decide alone."""
    if not (_is_expression(a) or _is_expression(b)):
        return b
    return node(*(tirx.IntImm("bool", int(value)) if isinstance(value, bool) else value for value in (a, b)))


def _alike(value: Any, other: Any) -> Any:
    """A number as a constant of the other's type."""
    if not isinstance(value, int | float):
        return value
    dtype = str(other.ty.dtype)
    if isinstance(value, float) and "float" not in dtype:
        raise TypeError(f"{value} is compared with an expression of {dtype}, which has no such number")
    return tirx.const(value, dtype)


def _is_expression(value: Any) -> bool:
    """Whether it is computed when the kernel is run."""
    return isinstance(value, ir.Expr | ExprOp)
