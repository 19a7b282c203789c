"""Expressions of lowered TIR to ids.

Each lane of a vector is computed separately, as GPUs do, except sums and products of float16, which GPUs
compute in pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.ir import Var

from nearfar.errors import BuildError

from .arithmetic import BOOL, F16, WIDTH, Arithmetic, Dtype, dtype_of
from .conversions import Conversions
from .intrinsics import Intrinsics
from .opcodes import Opcode
from .places import BufferPlaces
from .uses import cheap

_BINARY = {
    "Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div", "Mod": "mod", "FloorDiv": "floordiv",
    "FloorMod": "floormod", "Min": "min", "Max": "max", "BitwiseAnd": "and", "BitwiseOr": "or",
    "BitwiseXor": "xor", "LShift": "shl", "RShift": "shr",
}  # fmt: skip
_IN_PAIRS = ("Add", "Sub", "Mul")
_BINARY_CALLS = {
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "shift_left": "shl", "shift_right": "shr",
}  # fmt: skip
_FOUR_HALVES = "four_halves"  # the float16 in the halves of two words, as four float32
_COMPARE = {"EQ": "eq", "NE": "ne", "LT": "lt", "LE": "le", "GT": "gt", "GE": "ge"}


def dtype(expr: Any) -> Dtype:
    """Dtype of an expression, without its lanes."""
    return dtype_of(str(expr.ty.dtype))


def lanes(expr: Any) -> int:
    """Lanes of an expression."""
    return int(expr.ty.dtype.lanes)


def _in_pairs(expr: Any) -> bool:
    """Whether GPUs compute two lanes of the expression at once."""
    kind = type(expr).__name__
    if kind not in _IN_PAIRS and not (kind == "Call" and _is_fma(expr)):
        return False
    return lanes(expr) == WIDTH and dtype(expr) == F16


def _is_fma(call: Any) -> bool:
    return str(call.op.name).endswith("call_pure_extern") and str(call.args[0].value) == "fma"


class Expressions:
    """Computes expressions; see the module's docstring."""

    def __init__(self, arithmetic: Arithmetic, memory: BufferPlaces) -> None:
        self._arithmetic, self._memory, self._builder = arithmetic, memory, arithmetic.builder
        self.conversions = Conversions(arithmetic)
        self.intrinsics = Intrinsics(arithmetic, self.conversions)
        self._variables: dict[Var, tuple[int, ...]] = {}
        self._by_class: dict[str, Callable[[Any, int], int]] = {
            **{name: self._binary for name in _BINARY}, **{name: self._compare for name in _COMPARE},
            "IntImm": self._number, "FloatImm": self._number, "Var": self._variable, "Cast": self._cast,
            "And": self._and_or, "Or": self._and_or, "Not": self._not, "BitwiseNot": self._invert,
            "Select": self._select, "Ramp": self._ramp, "Broadcast": lambda e, _: self.value(e.value),
            "Shuffle": self._pick, "Let": self._let, "TensorLoad": self._load, "Call": self._call,
        }  # fmt: skip

    def value(self, expr: Any, lane: int = 0) -> int:
        """One lane of an expression."""
        made = self._by_class.get(type(expr).__name__)
        if made is None:
            raise BuildError(f"expression {type(expr).__name__} has no SPIR-V code: {expr}")
        return made(expr, lane)

    def values(self, expr: Any) -> tuple[int, ...]:
        """All lanes of an expression."""
        if _in_pairs(expr):
            return self._vector(expr)
        return tuple(self.value(expr, lane) for lane in range(lanes(expr)))

    def define(self, variable: Var, values: tuple[int, ...]) -> None:
        """Give a variable its values, for the code from here on."""
        self._variables[variable] = values

    def _number(self, expr: Any, _lane: int) -> int:
        return self._arithmetic.constant(dtype(expr), expr.value)

    def _variable(self, expr: Any, lane: int) -> int:
        found = self._variables.get(expr)
        if found is None:
            raise BuildError(f"variable {expr.name} is used before it is defined")
        return found[lane]

    def _vector(self, expr: Any) -> tuple[int, ...]:
        """A sum or product of vectors of float16; a sum with a product is one instruction."""
        if type(expr).__name__ == "Call":
            return self._arithmetic.vector("fma", [self.values(each) for each in expr.args[1:]])
        for a, b in ((expr.a, expr.b), (expr.b, expr.a)):
            if type(expr).__name__ == "Add" and type(b).__name__ == "Mul":
                return self._arithmetic.vector("fma", [self.values(each) for each in (b.a, b.b, a)])
        return self._arithmetic.vector(
            _BINARY[type(expr).__name__], [self.values(expr.a), self.values(expr.b)]
        )

    def _binary(self, expr: Any, lane: int) -> int:
        if _in_pairs(expr):
            return self._vector(expr)[lane]
        a, b = self.value(expr.a, lane), self.value(expr.b, lane)
        return self._arithmetic.binary(_BINARY[type(expr).__name__], dtype(expr), a, b)

    def _compare(self, expr: Any, lane: int) -> int:
        a, b = self.value(expr.a, lane), self.value(expr.b, lane)
        return self._arithmetic.compare(_COMPARE[type(expr).__name__], dtype(expr.a), a, b)

    def _and_or(self, expr: Any, lane: int) -> int:
        """The value of `and` or `or`. If the first operand decides, the second is not computed: it may read
        past a buffer.
        """
        conjunction = type(expr).__name__ == "And"
        a = self.value(expr.a, lane)
        known = self._arithmetic.known(a)
        if known is not None and bool(known) != conjunction:
            return a
        if known is not None or cheap(expr.b):
            return self._arithmetic.binary("and" if conjunction else "or", BOOL, a, self.value(expr.b, lane))
        decided = self._arithmetic.constant(BOOL, not conjunction)
        ways = (lambda: self.value(expr.b, lane), lambda: decided)
        return self._either(BOOL, a, *(ways if conjunction else ways[::-1]))

    def _not(self, expr: Any, lane: int) -> int:
        return self._arithmetic.negate_truth(self.value(expr.a, lane))

    def _invert(self, expr: Any, lane: int) -> int:
        return self._arithmetic.invert(dtype(expr), self.value(expr.a, lane))

    def _cast(self, expr: Any, lane: int) -> int:
        return self.conversions.cast(dtype(expr.value), dtype(expr), self.value(expr.value, lane))

    def _select(self, expr: Any, lane: int) -> int:
        condition = self.value(expr.condition, lane if lanes(expr.condition) > 1 else 0)
        known = self._arithmetic.known(condition)
        if known is not None:
            return self.value(expr.true_value if known else expr.false_value, lane)
        a, b = self.value(expr.true_value, lane), self.value(expr.false_value, lane)
        return self._arithmetic.select(dtype(expr), condition, a, b)

    def _ramp(self, expr: Any, lane: int) -> int:
        kind = dtype(expr)
        step = self._arithmetic.binary(
            "mul", kind, self.value(expr.stride), self._arithmetic.constant(kind, lane)
        )
        return self._arithmetic.binary("add", kind, self.value(expr.base), step)

    def _pick(self, expr: Any, lane: int) -> int:
        flat = [(vector, i) for vector in expr.vectors for i in range(lanes(vector))]
        index = expr.indices[lane]
        return self.value(*flat[int(index.value)])

    def _let(self, expr: Any, lane: int) -> int:
        self.define(expr.var, self.values(expr.value))
        return self.value(expr.body, lane)

    def _load(self, expr: Any, lane: int) -> int:
        index = self.only_index(expr)
        if self._memory.lanes(expr.source) > 1:
            return self._memory.load(expr.source, self.vector_index(index), lane)
        return self._memory.load(expr.source, self.value(index, lane))

    def only_index(self, access: Any) -> Any:
        """The index into flat memory."""
        if len(access.indices) != 1:
            raise BuildError(
                f"an access with {len(access.indices)} indices has no SPIR-V code: lowering flattens buffers"
            )
        return access.indices[0]

    def vector_index(self, index: Any) -> int:
        """The index of a vector in a buffer: the index itself in a buffer of vectors, else computed from the
        ramp.
        """
        if lanes(index) == 1:
            return self.value(index)
        kind = dtype(index)
        return self._arithmetic.binary(
            "div", kind, self.value(index), self._arithmetic.constant(kind, lanes(index))
        )

    def _call(self, expr: Any, lane: int) -> int:
        name = str(expr.op.name).split(".")[-1]
        args = list(expr.args)
        if name in ("call_pure_extern", "call_extern"):
            name, args = str(args[0].value), args[1:]
        if _in_pairs(expr):
            return self._vector(expr)[lane]
        if name == "if_then_else":
            return self._if_then_else(expr, lane)
        if name in ("likely", "tvm_thread_invariant"):
            return self.value(args[0], lane)
        if name == "reinterpret":
            if dtype(expr) == F16 and lanes(expr) == 2 * lanes(args[0]):
                return self.conversions.half_of(self.value(args[0], lane // 2), lane % 2)
            if lanes(args[0]) != lanes(expr):
                raise BuildError(f"reinterpret of other lanes has no SPIR-V code: {expr}")
            return self.conversions.reinterpret(dtype(args[0]), dtype(expr), self.value(args[0], lane))
        if name in ("bitwise_not",):
            return self._arithmetic.invert(dtype(expr), self.value(args[0], lane))
        if name == "large_uint_imm":
            return self._arithmetic.constant(dtype(expr), int(args[0].value) + (int(args[1].value) << 32))
        if name == _FOUR_HALVES:
            return self.conversions.half(self.value(args[0], lane // 2), lane % 2)
        if name not in _BINARY_CALLS and not self.intrinsics.has(name):
            raise BuildError(f"intrinsic {name} has no SPIR-V code: {expr}")
        values = [self.value(arg, lane if lanes(arg) > 1 else 0) for arg in args]
        if name in _BINARY_CALLS:
            return self._arithmetic.binary(_BINARY_CALLS[name], dtype(expr), *values)
        return self.intrinsics.call(name, dtype(expr), [dtype(arg) for arg in args], values)

    def _if_then_else(self, expr: Any, lane: int) -> int:
        condition = self.value(expr.args[0], lane if lanes(expr.args[0]) > 1 else 0)
        known = self._arithmetic.known(condition)
        if known is not None:
            return self.value(expr.args[1 if known else 2], lane)
        if cheap(expr.args[1]) and cheap(expr.args[2]):
            a, b = self.value(expr.args[1], lane), self.value(expr.args[2], lane)
            return self._arithmetic.select(dtype(expr), condition, a, b)
        return self._either(
            dtype(expr),
            condition,
            lambda: self.value(expr.args[1], lane),
            lambda: self.value(expr.args[2], lane),
        )

    def _either(
        self, kind: Dtype, condition: int, then: Callable[[], int], otherwise: Callable[[], int]
    ) -> int:
        """Compute one of two values, by a condition."""
        builder = self._builder
        ways, merge = (builder.new_id(), builder.new_id()), builder.new_id()
        builder.emit(Opcode.SELECTION_MERGE, merge, 0)
        builder.end(Opcode.BRANCH_CONDITIONAL, condition, *ways)
        found: list[int] = []
        for way, compute in zip(ways, (then, otherwise), strict=True):
            builder.label(way)
            with builder.scope(), self._memory.branch(set()):
                found += [compute(), builder.block]
                builder.branch(merge)
        builder.label(merge)
        return builder.value(Opcode.PHI, self._arithmetic.computes(kind), *found)
