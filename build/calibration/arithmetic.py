"""The operations of a step in NumPy, on float arrays whose first axis is rows; formulas as in step/ops.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.step.operation import Activation
from nearfar.step.rope import Rope

Array = npt.NDArray[Any]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Normalize x over its last axis by the root of the mean square, and multiply by the weight."""
    normed: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + x.dtype.type(eps)) * weight
    return normed


def linear(x: Array, weight: Array, bias: Array | None) -> Array:
    """x·Wᵀ + b."""
    y: Array = x @ weight.T
    return y if bias is None else y + bias


def capped(x: Array, softcap: float | None) -> Array:
    """Limit x smoothly to ±softcap; None leaves it as it is."""
    if softcap is None:
        return x
    return np.asarray(np.tanh(x / x.dtype.type(softcap)) * x.dtype.type(softcap))


def rotate(x: Array, rope: Rope, positions: Array) -> Array:
    """Rotate and scale the pairs (i, i + D/2) of x [M, heads, D]; pairs of frequency 0 stay unchanged."""
    angles, scales = np.maximum(positions, 0)[:, None] * np.array(rope.inv_freq), scales_of(rope)
    cos, sin = ((turn(angles) * scales).astype(x.dtype)[:, None] for turn in (np.cos, np.sin))
    a, b = np.split(x, 2, -1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def scales_of(rope: Rope) -> Array:
    """Factors by which the cosine and sine of each pair are multiplied."""
    return np.where(np.array(rope.inv_freq) != 0, rope.scale, 1.0)


def _gelu_erf(x: Array) -> Array:
    return np.asarray((x * 0.5 * (1 + _erf(x / math.sqrt(2)))).astype(x.dtype))


def _erf(x: Array) -> Array:
    """The error function by Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 7.1.26; |error|
    ≤ 1.5e-7.
    """
    t = 1 / (1 + 0.3275911 * np.abs(x))
    powers = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return np.asarray(np.sign(x) * (1 - powers * np.exp(-x * x)))


def _gelu_tanh(x: Array) -> Array:
    inner = x.dtype.type(math.sqrt(2 / math.pi)) * (x + x.dtype.type(0.044715) * x**3)
    return np.asarray(x * 0.5 * (1 + np.tanh(inner)))


def _silu(x: Array) -> Array:
    # exp(-x) of a large negative x overflows, and the quotient becomes 0 as it should
    with np.errstate(over="ignore"):
        return np.asarray(x / (1 + np.exp(-x)))


def sigmoid(x: Array) -> Array:
    """1 / (1 + e⁻ˣ)."""
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-x)))


def unit(x: Array, eps: float) -> Array:
    """Scale x to length 1 along its last axis."""
    return np.asarray(x / np.sqrt((x * x).sum(-1, keepdims=True) + x.dtype.type(eps)))


ACTIVATIONS: Mapping[Activation, Callable[[Array], Array]] = {
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
    "gelu_erf": _gelu_erf,
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "sigmoid": sigmoid,
}
