"""Codes by second moments: never worse than the searches from which they start, and equal to plain
formulas.
"""

from __future__ import annotations

import numpy as np
import pytest

from nearfar.build.weights.quantize import Scheme, dequantize, quantize
from nearfar.build.weights.second_order import DAMPING, Curvature, error, quantize_second_order

SCHEMES = [Scheme(2, 64), Scheme(3, 32), Scheme(4, 64), Scheme(5, 128), Scheme(8, 16)]


def matrix(n: int = 40, k: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """Weights, and the moments of correlated inputs of different sizes."""
    rng = np.random.default_rng(3)
    inputs = rng.normal(0, 1, (2000, 24)) @ rng.normal(0, 1, (24, k)) + rng.normal(0, 0.7, (2000, k))
    inputs *= rng.lognormal(0, 1, k)
    return rng.normal(0, 0.05, (n, k)).astype(np.float32), inputs.T @ inputs / len(inputs)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s.name}g{s.group_size}")
def test_each_quality_loses_less_than_the_one_below(scheme: Scheme) -> None:
    weight, moments = matrix()
    curvature = Curvature.of(moments)
    diagonal = curvature.importance
    fast = dequantize(quantize(weight, scheme), scheme.group_size)
    good = dequantize(quantize(weight, scheme, "w", diagonal), scheme.group_size)
    best = dequantize(quantize_second_order(weight, scheme, "w", curvature), scheme.group_size)
    weighted = [float(((weight - found) ** 2 * diagonal).sum()) for found in (fast, good)]
    assert weighted[1] < 0.95 * weighted[0]
    whole = [error(weight, found, curvature.moments) for found in (good, best)]
    assert whole[1] < 0.5 * whole[0]


def test_equal_importance_is_none() -> None:
    weight, _ = matrix()
    plain, weighted = (
        quantize(weight, Scheme(4), "w", importance)
        for importance in (None, np.full(weight.shape[1], 7, np.float32))
    )
    np.testing.assert_array_equal(dequantize(plain, 64), dequantize(weighted, 64))


def test_the_factor_is_that_of_the_inverse() -> None:
    _, moments = matrix(k=96)
    curvature = Curvature.of(moments)
    damped = moments + np.eye(96) * DAMPING * np.diagonal(moments).mean()
    inverse = np.linalg.inv(damped)[curvature.order][:, curvature.order]
    assert np.allclose(np.tril(curvature.factor, -1), 0)
    np.testing.assert_allclose(curvature.factor.T @ curvature.factor, inverse, rtol=1e-3, atol=1e-7)
    assert (np.diff(np.diagonal(moments)[curvature.order]) <= 0).all()


def test_inputs_that_never_moved_do_no_harm() -> None:
    """Some moments, or all, are zero."""
    weight, moments = matrix()
    moments[:70] = 0
    moments[:, :70] = 0
    for given in (moments, np.zeros_like(moments)):
        found = dequantize(quantize_second_order(weight, Scheme(4), "w", Curvature.of(given)), 64)
        plain = dequantize(quantize(weight, Scheme(4)), 64)
        assert np.isfinite(found).all()
        assert np.abs(weight - found)[:, :64].max() < 4 * np.abs(weight - plain)[:, :64].max()


def test_the_same_matrix_gives_the_same_codes() -> None:
    weight, moments = matrix(n=700)
    curvature = Curvature.of(moments)
    first, again = (quantize_second_order(weight, Scheme(3), "w", curvature) for _ in range(2))
    np.testing.assert_array_equal(first.words, again.words)
    np.testing.assert_array_equal(first.scales, again.scales)
    alone = quantize_second_order(weight[600:], Scheme(3), "w", curvature)
    np.testing.assert_array_equal(alone.codes, first.codes[600:])
