"""Functions on sixteen lanes that gate and bound the outputs of matmuls: activations, tanh, softcap."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.step.operation import Activation
from nearfar.targets.cpu.kernels import vec as v

Expr = Any
ERFC = (
    -1.265447997, 0.9986327833, 0.3866404121, 0.03460280022, 0.001267585838, -0.08028043141, -0.6962518995,
    1.156733757, -0.6808271778, 0.1449302137,
)  # fmt: skip
TANH = (-0.333333291, 0.1333278226, -0.05385249751, 0.02100364135, -0.006104948163)


def silu(x: Expr) -> Expr:
    """x·σ(x)."""
    return T.Bind(x / (v.splat(1.0) + v.exp(v.splat(0.0) - x)))


def sigmoid(x: Expr) -> Expr:
    """1 / (1 + e⁻ˣ); NaN stays NaN, which v.exp would make a number of."""
    x = v.keep(x)
    found = T.Bind(v.splat(1.0) / (v.splat(1.0) + v.exp(v.splat(0.0) - x)))
    size = T.Bind(v.bits(x, v.I32X16) & v.isplat(0x7FFFFFFF))
    return T.Bind(tirx.Select(size > v.isplat(0x7F800000), x, found))


def softplus(x: Expr) -> Expr:
    """log(1 + eˣ) = max(x, 0) + log(1 + e^−|x|)."""
    x = v.keep(x)
    return T.Bind(tirx.max(x, v.splat(0.0)) + v.log1p(v.exp(v.splat(0.0) - tirx.abs(x))))


def gelu_tanh(x: Expr) -> Expr:
    """0.5·x·(1 + tanh u), u = √(2/π)·(x + 0.044715·x³); and 0.5·(1 + tanh u) is σ(2u)."""
    x = v.keep(x)
    double = T.Bind(
        x * (v.splat(2 * math.sqrt(2 / math.pi)) + v.splat(2 * math.sqrt(2 / math.pi) * 0.044715) * (x * x))
    )
    return T.Bind(x / (v.splat(1.0) + v.exp(v.splat(0.0) - double)))


def gelu_erf(x: Expr) -> Expr:
    """x·Φ(x) = max(x, 0) − 0.5·|x|·erfc(|x|/√2), with an error below 3e-7.

    erfc(z) = t·exp(p(t) − z²), t = 1/(1 + z/2): p is our own fit of degree 9 at Chebyshev's nodes for z ≤ 10,
    within 5e-8.
    """
    x = v.keep(x)
    size = v.keep(tirx.abs(x))
    z = T.Bind(size * v.splat(math.sqrt(0.5)))
    t = v.keep(v.splat(1.0) / (v.splat(1.0) + z * v.splat(0.5)))
    power = _polynomial(t, ERFC)
    return T.Bind(_positive(x) - v.splat(0.5) * size * t * v.exp(power - z * z))


def relu2(x: Expr) -> Expr:
    """max(x, 0)²."""
    positive = T.Bind(_positive(x))
    return T.Bind(positive * positive)


ACTIVATIONS: dict[Activation, Callable[[Expr], Expr]] = {
    "silu": silu, "gelu_tanh": gelu_tanh, "gelu_erf": gelu_erf, "relu2": relu2, "sigmoid": sigmoid,
}  # fmt: skip


def softcap(x: Expr, limit: float) -> Expr:
    """Limit · tanh(x / limit)."""
    return v.keep(tanh(x * v.splat(1.0 / limit)) * v.splat(limit))


def tanh(x: Expr) -> Expr:
    """Hyperbolic tangent, with a relative error of 4e-7: 1 − 2/(1 + e^2x), or a polynomial near 0.

    tanh(x) = x + x³·p(x²) for |x| ≤ 0.625: p is our own fit of degree 4 at Chebyshev's nodes.
    """
    x = v.keep(x)
    square = v.keep(x * x)
    near = _polynomial(square, TANH)
    far = T.Bind(v.splat(1.0) - v.splat(2.0) / (v.splat(1.0) + v.exp(x + x)))
    # A NaN takes the polynomial: exp would turn it into a number.
    return T.Bind(tirx.Select(square > v.splat(0.625**2), far, x + x * square * near))


def _positive(x: Expr) -> Expr:
    """max(x, 0), and NaN for NaN: the CPU's maximum would give 0."""
    return tirx.Select(x < v.splat(0.0), v.splat(0.0), x)


def _polynomial(x: Expr, coefficients: tuple[float, ...]) -> Expr:
    """A polynomial by Horner's rule; the constant term comes first."""
    value = v.splat(coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = T.Bind(value * x + v.splat(coefficient))
    return value
