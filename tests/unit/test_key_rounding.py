"""The rounding of 4-bit keys, computed from the keys and queries of a forward."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from nearfar.build.calibration.keys import RIDGE, _Seen
from nearfar.build.options import BuildOptions
from tests.support import quantized_kv
from tests.support.commands import nearfar

SAMPLE = Path(__file__).parents[2] / "examples" / "sample-model"


def seen(rng: np.random.Generator) -> tuple[_Seen, np.ndarray, np.ndarray]:
    """Statistics of keys [2, 1, 500, 64] around a constant, and of queries [2, 1, 3, 500, 64] with a common
    main direction.
    """
    constant, way = rng.standard_normal((2, 64)) * 4
    keys = rng.standard_normal((2, 1, 500, 64)) + constant
    queries = rng.standard_normal((2, 1, 3, 500, 64)) + way
    found = _Seen()
    for each in range(2):
        found.append(keys[each : each + 1])
        found.attend(queries[each : each + 1])
    return found, keys.reshape(-1, 64), queries.reshape(-1, 64)


def test_a_constant_is_the_middle_of_nearly_all_keys() -> None:
    found, keys, _ = seen(np.random.default_rng(0))
    found.keys[0][0] = 1e4  # one key that is unlike all others
    low, high = np.quantile(np.concatenate([found.keys[0][:, 0], keys[500:]]), [0.001, 0.999], axis=0)
    center, _ = found.rounding()
    np.testing.assert_allclose(center[0], (low + high) / 2, rtol=1e-3)
    assert np.abs(center).max() < 100


def test_an_offset_makes_up_for_what_queries_see_of_errors() -> None:
    found, keys, queries = seen(np.random.default_rng(1))
    center, weights = found.rounding()
    for group in np.split(np.arange(64), 2):
        moments = queries[:, group].T @ queries[:, group]
        wanted = moments.sum(0) / (moments.sum() + RIDGE * np.trace(moments))
        np.testing.assert_allclose(weights[0, group], wanted, rtol=1e-3, atol=1e-5)
    lost = []
    for by in (None, weights):
        stored = quantized_kv.rounded(keys - center, "int4", by)
        lost.append(np.square((keys - center - stored) @ queries.T).mean())
    assert lost[1] < 0.75 * lost[0]


def test_what_is_no_number_is_left_out() -> None:
    found = _Seen()
    found.append(np.full((1, 1, 4, 32), np.nan))
    found.attend(np.zeros((1, 1, 1, 4, 32)))
    assert (found.rounding() == 0).all()


def test_keys_are_calibrated_for_targets_that_round_them(tmp_path: Path) -> None:
    """mlx quantizes a cache as it runs: a calibration would take 23 s for nothing, and snapshots would depend
    on it.
    """
    done = nearfar(
        "build", SAMPLE, "--target", "mlx", "--kv-bits", "16,4", "--quant", "none", "-o", tmp_path / "out"
    )
    assert done.returncode == 0, done.stderr
    assert "calibrating the keys" not in done.stderr
    assert "keys" not in json.loads((tmp_path / "out" / "mlx" / "manifest.json").read_text())["provenance"]
    options = BuildOptions(str(SAMPLE), tmp_path, ("mlx", "cpu"), kv_bits=(16, 4))
    assert (options.rounds_keys, options.rounds_keys_of("mlx"), options.rounds_keys_of("cpu")) == (
        True, False, True,
    )  # fmt: skip
    assert not BuildOptions(str(SAMPLE), tmp_path, ("cpu",), kv_bits=(16, 8)).rounds_keys
