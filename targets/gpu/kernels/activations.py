"""Activations and the soft cap on float32, made of exp alone.

WGSL has no erf, and some drivers' tanh of a large number is NaN. NaN stays NaN, because it shows that
something went wrong before. Each function uses its argument more than once, so the argument should be a
local.
"""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
from __future__ import annotations

import math

from tvm.script import tirx as T

from nearfar.kernels.jobs import Activation

NEAR = 0.25
TAYLOR = (62 / 2835, -17 / 315, 2 / 15, -1 / 3, 1.0)  # tanh(x)/x in x², from the highest power
# erfc(z) = exp(-z²)·(a1·t + … + a5·t⁵) with t = 1/(1 + p·z), z ≥ 0, within 1.5e-7: Abramowitz & Stegun,
# 7.1.26.
ERFC_P = 0.3275911
ERFC = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592, 0.0)  # from the highest power


def polynomial(value, factors: tuple[float, ...]):
    """A polynomial by Horner's rule; the highest power's factor comes first."""
    total = T.float32(factors[0])
    for factor in factors[1:]:
        total = total * value + T.float32(factor)
    return total


def tanh(value):
    """1 - 2/(1 + exp(2x)), or, near 0, where that loses digits, the Taylor series; relative error 1e-6."""
    steep = T.float32(1) - T.float32(2) / (T.float32(1) + T.exp(value * T.float32(2)))
    square = value * value
    return T.Select(square < T.float32(NEAR**2), value * polynomial(square, TAYLOR), steep)


def capped(value, cap: float | None):
    """c·tanh(value/c); without a cap the value itself."""
    return value if cap is None else tanh(value * T.float32(1 / cap)) * T.float32(cap)


def sigmoid_product(value, inner):
    """Value · sigmoid(inner)."""
    return value / (T.float32(1) + T.exp(-inner))


def softplus(value):
    """ln(1 + exp(value))."""
    return T.max(value, T.float32(0)) + T.log(T.float32(1) + T.exp(-T.max(value, -value)))


def gelu_tanh(value):
    """0.5·x·(1 + tanh(u)) = x·sigmoid(2u), u = √(2/π)·(x + 0.044715·x³)."""
    inner = value * (T.float32(1) + T.float32(0.044715) * value * value)
    return sigmoid_product(value, T.float32(2 * math.sqrt(2 / math.pi)) * inner)


def gelu_erf(value):
    """x·Φ(x) = max(x, 0) - ½·|x|·erfc(|x|/√2)."""
    z = T.max(value, -value) * T.float32(math.sqrt(0.5))
    t = T.float32(1) / (T.float32(1) + T.float32(ERFC_P) * z)
    return T.max(value, T.float32(0)) - T.float32(math.sqrt(0.5)) * z * (polynomial(t, ERFC) * T.exp(-z * z))


def relu2(value):
    """max(x, 0)² as ¼·(x + |x|)², which keeps NaN."""
    double = value + T.max(value, -value)
    return T.float32(0.25) * double * double


def activated(activation: Activation, value):
    """The activation of a value."""
    if activation == "silu":
        return sigmoid_product(value, value)
    if activation == "sigmoid":
        return sigmoid_product(T.float32(1), value)
    return {"gelu_tanh": gelu_tanh, "gelu_erf": gelu_erf, "relu2": relu2}[activation](value)
