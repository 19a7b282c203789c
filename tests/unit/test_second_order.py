"""Codes by second moments: never worse than the searches from which they start, and equal to plain
formulas.
"""

from __future__ import annotations

import numpy as np
import pytest

from nearfar.build.weights.quantize import Scheme, dequantize, quantize
from nearfar.build.weights.second_order import DAMPING, Curvature, _Rows, error, quantize_second_order

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


@pytest.mark.parametrize("k", [96, 333])
def test_the_factor_is_that_of_the_inverse(k: int) -> None:
    """Matrices of more inputs than a block are inverted by halves, here of different sizes."""
    _, moments = matrix(k=k)
    curvature = Curvature.of(moments)
    damped = moments + np.eye(k) * DAMPING * np.diagonal(moments).mean()
    inverse = np.linalg.inv(damped)[curvature.order][:, curvature.order]
    assert np.allclose(np.tril(curvature.factor, -1), 0)
    np.testing.assert_allclose(curvature.factor.T @ curvature.factor, inverse, rtol=1e-3, atol=1e-7)
    assert (np.diff(np.diagonal(moments)[curvature.order]) <= 0).all()


def test_rounding_carries_each_error_to_all_later_inputs() -> None:
    """The pass by halves gives the codes of the plain pass, which carries the error of each input at once."""
    weight, moments = matrix(k=320)
    scheme, curvature = Scheme(3, 64), Curvature.of(moments)
    rows = _Rows(weight, quantize(weight, scheme, "w", curvature.importance), scheme, curvature)
    rows.round()
    left, codes = weight[:, curvature.order].astype(np.float64), np.empty_like(weight)
    for at, input in enumerate(curvature.order):
        scale, bias = (grid[:, input // 64].astype(np.float64) for grid in (rows.scale, rows.bias))
        codes[:, input] = np.clip(np.rint((left[:, at] - bias) / scale), 0, 7)
        missed = (left[:, at] - scale * codes[:, input] - bias) / curvature.factor[at, at]
        left[:, at:] -= missed[:, None] * curvature.factor[at, at:]
    assert (rows.codes == codes).mean() > 0.999  # float32 rounds a few weights between two codes differently


def test_a_refit_sees_the_changes_of_the_groups_before() -> None:
    """Refitting one more group never makes the error of a whole row larger."""
    weight, moments = matrix(k=320)
    scheme, curvature = Scheme(3, 64), Curvature.of(moments)
    rows = _Rows(weight, quantize(weight, scheme, "w", curvature.importance), scheme, curvature)
    rows.round()
    scale, bias = rows.scale.copy(), rows.bias.copy()
    rows.refit()

    def lost(groups: int) -> np.ndarray:
        """The error of each row with the first `groups` refitted."""
        left = weight - np.hstack([
            rows.codes[:, at * 64 : at * 64 + 64] * (rows.scale if at < groups else scale)[:, at, None]
            + (rows.bias if at < groups else bias)[:, at, None]
            for at in range(5)
        ])  # fmt: skip
        return np.asarray(((left @ curvature.moments) * left).sum(1))

    errors = np.array([lost(groups) for groups in range(6)])
    assert (np.diff(errors, axis=0) <= 1e-4 * errors[:-1]).all()
    assert errors[-1].sum() < 0.985 * errors[0].sum()


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
