"""Elementwise operations: activations and sums, and the clamping that keeps a float16 program finite.

In a float16 program, products with weights, keys and values are float16. Sums of layers, results of norms and
all elementwise results are float32: some models (Gemma) have residual values that float16 cannot represent. A
value that is converted to float16 saturates at 65504. A product's result beyond that counts as 65504, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import add, mul

import mlx.core as mx

from nearfar.step.operation import Activation

LARGEST = 65504.0
"""The largest float16."""

Unary = Callable[[mx.array], mx.array]
Binary = Callable[[mx.array, mx.array], mx.array]


class Elementwise:
    """Elementwise operations of one program, whose products have `dtype`."""

    def __init__(self, dtype: mx.Dtype, compiled: bool) -> None:
        """`compiled`: each operation is one launch. On a CPU that needs a C++ compiler and saves nothing
        (measured).
        """
        self.dtype = dtype
        self._compiled = compiled
        self._made: dict[object, Callable[..., mx.array]] = {}
        half = dtype == mx.float16
        self.wide: Unary | None = wide if half else None
        """Converts a value for sums and norms to float32; None if all values are float32 already."""
        self.narrow: Unary | None = self._narrow if half else None
        """Converts a value for products to float16; None if all values are float32."""

    def glu(self, kind: Activation) -> Binary:
        """activation(gate)·up, in the dtype that products read."""
        act = ACTIVATIONS[kind]
        return self._compile(("glu", kind), lambda gate, up: act(gate) * up, for_product=True)

    def clamped(self, alpha: float, limit: float) -> Binary:
        """gpt-oss's gate (nearfar.step.ops.Experts.clamp), in the dtype that products read."""

        def gated(gate: mx.array, up: mx.array) -> mx.array:
            gate = mx.minimum(gate, limit)
            return (mx.clip(up, -limit, limit) + 1) * gate * mx.sigmoid(alpha * gate)

        return self._compile(("clamped", alpha, limit), gated, for_product=True)

    def act(self, kind: Activation) -> Unary:
        """activation(x), in the dtype that products read."""
        return self._compile(("act", kind), ACTIVATIONS[kind], for_product=True)

    def add(self, scale: float) -> Binary:
        """(a + b)·scale in float32."""
        return self._compile(("add", scale), add if scale == 1 else lambda a, b: (a + b) * scale)

    def mul(self) -> Binary:
        """a·b in float32."""
        return self._compile("mul", mul)

    def _narrow(self, x: mx.array) -> mx.array:
        return x if x.dtype == mx.float16 else self._compile("narrow", _same, for_product=True)(x)

    def _compile(
        self, key: object, function: Callable[..., mx.array], for_product: bool = False
    ) -> Callable[..., mx.array]:
        """Adapt a function of float32 arrays to the program's dtypes; each is made once."""
        if key not in self._made:
            if self.dtype == mx.float16:
                function = _in_float16(function, saturated if for_product else None)
            self._made[key] = mx.compile(function, shapeless=True) if self._compiled else function
        return self._made[key]


def wide(x: mx.array) -> mx.array:
    """Convert float16 to float32, with infinities clamped to ±65504; NaN stays."""
    return mx.clip(x.astype(mx.float32), -LARGEST, LARGEST) if x.dtype == mx.float16 else x


def saturated(x: mx.array) -> mx.array:
    """Convert to float16, clamped to ±65504."""
    return mx.clip(x, -LARGEST, LARGEST).astype(mx.float16)


def _in_float16(function: Callable[..., mx.array], out: Unary | None) -> Callable[..., mx.array]:
    """Apply a function to values of a float16 program, widened to float32; `out` converts the result."""
    if out is None:
        return lambda *values: function(*map(wide, values))
    return lambda *values: out(function(*map(wide, values)))


def _same(x: mx.array) -> mx.array:
    return x


def _silu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)


def _gelu_tanh(x: mx.array) -> mx.array:
    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def _gelu_erf(x: mx.array) -> mx.array:
    return 0.5 * x * (1 + mx.erf(x * math.sqrt(0.5)))


def _relu2(x: mx.array) -> mx.array:
    return mx.square(mx.maximum(x, 0))


ACTIVATIONS: dict[Activation, Unary] = {
    "silu": _silu, "gelu_tanh": _gelu_tanh, "gelu_erf": _gelu_erf, "relu2": _relu2, "sigmoid": mx.sigmoid,
}  # fmt: skip
