"""Element by element: activations and sums, and what keeps a float16 program finite.

In a float16 program products with weights, keys and values are float16; sums of layers, what norms make and
everything computed element by element are float32, as some models (Gemma) carry values in their residual that
float16 has no numbers for. A value that becomes float16 saturates: beyond 65504 it is 65504. What a product
wrote beyond that counts as 65504 too.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx

from nearfar.step.ops import Activation

LARGEST = 65504.0
"""Of float16."""

Unary = Callable[[mx.array], mx.array]
Binary = Callable[[mx.array, mx.array], mx.array]


class Elementwise:
    """The operations of one program, whose products have `dtype`."""

    def __init__(self, dtype: mx.Dtype, compiled: bool) -> None:
        """`compiled`: each in one launch. On a CPU that needs a C++ compiler and saves nothing (measured)."""
        self.dtype = dtype
        self._compiled = compiled
        self._made: dict[object, Callable[..., mx.array]] = {}
        half = dtype == mx.float16
        self.wide: Unary | None = wide if half else None
        """As sums and norms read a value; None: as it is, where all is float32."""
        self.narrow: Unary | None = self._narrow if half else None
        """As products read it."""
        self._wide, self._saturated = (wide, saturated) if half else (same, same)

    def glu(self, kind: Activation) -> Binary:
        """activation(gate)·up, for a product to read."""
        act, wide, out = ACTIVATIONS[kind], self._wide, self._saturated
        return self._compile(("glu", kind), lambda g, u: out(act(wide(g)) * wide(u)))

    def act(self, kind: Activation) -> Unary:
        """activation(x), for a product to read."""
        act, wide, out = ACTIVATIONS[kind], self._wide, self._saturated
        return self._compile(("act", kind), lambda y: out(act(wide(y))))

    def add(self, scale: float) -> Binary:
        """(a + b)·scale in float32."""
        wide = self._wide
        if scale == 1:
            return self._compile(("add", scale), lambda x, y: wide(x) + wide(y))
        return self._compile(("add", scale), lambda x, y: (wide(x) + wide(y)) * scale)

    def mul(self) -> Binary:
        """a·b in float32."""
        wide = self._wide
        return self._compile("mul", lambda x, y: wide(x) * wide(y))

    def _narrow(self, x: mx.array) -> mx.array:
        return x if x.dtype == mx.float16 else self._compile("narrow", saturated)(x)

    def _compile(self, key: object, function: Callable[..., mx.array]) -> Callable[..., mx.array]:
        if key not in self._made:
            self._made[key] = mx.compile(function, shapeless=True) if self._compiled else function
        return self._made[key]


def wide(x: mx.array) -> mx.array:
    """In float32, finite unless it is NaN."""
    return mx.clip(x.astype(mx.float32), -LARGEST, LARGEST) if x.dtype == mx.float16 else x


def saturated(x: mx.array) -> mx.array:
    """In float16."""
    return mx.clip(x, -LARGEST, LARGEST).astype(mx.float16)


def same(x: mx.array) -> mx.array:
    """As it is: a float32 program has one type."""
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
    "silu": _silu, "gelu_tanh": _gelu_tanh, "gelu_erf": _gelu_erf, "relu2": _relu2,
}  # fmt: skip
