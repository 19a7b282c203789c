"""The functions that build a kernel: parser.py turns the statements of its script into calls of them.

They write to TVM's IRBuilder, as do the functions that kernels call. As in TVM's parser, a comparison of
known values is Python's, and one of an expression is a node that nothing simplifies yet.
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
"""Comparisons by their names in `ast`: the function for values, and the one for expressions."""


def parameter(name: str, kind: Any) -> Any:
    """Declare a parameter of the kernel, with the type of its annotation."""
    return builder.arg(name, kind if isinstance(kind, ir.Expr) else kind())


def loop(frame: Any) -> Any:
    """A loop's frame, checked; TypeError for anything else."""
    if not isinstance(frame, builder.frame.ForFrame):
        raise TypeError(f"a kernel loops over T.serial, T.unroll or T.thread_binding, not over {frame!r}")
    return frame


def named(name: str, variable: Any) -> None:
    """Give the variable of a loop its name in the script."""
    IRBuilder.name(name, variable)


class Branch:
    """Both branches of an `if` that the kernel decides at run time."""

    holds = fails = True
    then, otherwise = staticmethod(builder.Then), staticmethod(builder.Else)

    def __init__(self, test: Any) -> None:
        self.frame = builder.If(test)

    def __enter__(self) -> Branch:
        self.frame.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.frame.__exit__(*error)


class DecidedBranch:
    """The remaining branch of an `if` that is decided while the kernel is made."""

    then = otherwise = staticmethod(nullcontext)

    def __init__(self, holds: bool) -> None:
        self.holds, self.fails = holds, not holds


_KNOWN = {holds: nullcontext(DecidedBranch(holds)) for holds in (False, True)}


def branch(test: Any) -> AbstractContextManager[Branch | DecidedBranch]:
    """The branches of an `if`: both, or the known one."""
    if isinstance(test, bool):
        return _KNOWN[test]
    if not _is_expression(test):
        raise TypeError(f"a kernel decides by a truth value or an expression, not by {test!r}")
    return Branch(test)


def store(value: Any, places: Sequence[Any], array: Any) -> None:
    """Store a value in an array."""
    builder.buffer_store(array, value, places)


def bind(name: str, value: Any) -> Any:
    """The value that `name = value` binds: arrays and variables get the name as their own."""
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
    """A named variable that the kernel computes once."""
    value = value if isinstance(value, ir.Expr) else tirx.const(value)
    variable = tirx.Var(name, value.ty)
    builder.Bind(value, var=variable)
    return variable


def evaluate(value: Any) -> None:
    """Evaluate a call that is a statement; its result is None if it wrote statements itself."""
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
    """The value of `and`; later operands are evaluated only if needed."""
    value = first()
    for more in rest:
        if not _is_expression(value) and not value:
            return value
        value = _joined(tirx.And, value, more())
    return value


def some(first: Callable[[], Any], *rest: Callable[[], Any]) -> Any:
    """The value of `or`; later operands are evaluated only if needed."""
    value = first()
    for more in rest:
        if not _is_expression(value) and value:
            return value
        value = _joined(tirx.Or, value, more())
    return value


def negated(value: Any) -> Any:
    """The value of `not`."""
    return tirx.Not(value) if _is_expression(value) else not value


def chosen(test: Any, value: Callable[[], Any], other: Callable[[], Any]) -> Any:
    """The value of `value if test else other`."""
    if isinstance(test, bool):
        return value() if test else other()
    return tirx.if_then_else(test, value(), other())


def _joined(node: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """Join two truth values, of which the first does not decide alone."""
    if not (_is_expression(a) or _is_expression(b)):
        return b
    return node(*(tirx.IntImm("bool", int(value)) if isinstance(value, bool) else value for value in (a, b)))


def _alike(value: Any, other: Any) -> Any:
    """A number as a constant of the other operand's type; an expression stays as it is."""
    if not isinstance(value, int | float):
        return value
    dtype = str(other.ty.dtype)
    if isinstance(value, float) and "float" not in dtype:
        raise TypeError(f"{value} is compared with an expression of {dtype}, which has no such number")
    return tirx.const(value, dtype)


def _is_expression(value: Any) -> bool:
    """Whether a value is an expression, which the kernel computes at run time."""
    return isinstance(value, ir.Expr | ExprOp)
