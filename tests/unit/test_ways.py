"""Ways of storing scales that our own quantization chooses from: as many bytes as pairs, and less error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nearfar.build.calibration.quality import check_quality, with_storable
from nearfar.build.options import BuildOptions, Quality
from nearfar.build.source import Source, open_source
from nearfar.build.targets import target_of
from nearfar.build.weights.quantize import Scheme, dequantize, quantize
from nearfar.build.weights.second_order import Curvature, error, quantize_second_order
from nearfar.build.weights.solved import Solved
from nearfar.build.weights.ways import WAYS, storable, way, ways
from nearfar.errors import BuildError
from nearfar.format.scales import CODE_BITS, OF_GGUF, PAIRS, SYMMETRIC, Scales
from nearfar.kernels.quantized import Matrix, QuantTensor, StorableMatrices
from tests.support.quantized import CONFIG, weights, write
from tests.support.quantized_formats import gptq

EVERYTHING = StorableMatrices()
LEVELS = OF_GGUF["Q4_K"]
SOME = [Scheme(2, 64), Scheme(3, 128), Scheme(4, 64), Scheme(5, 32), Scheme(8, 64)]
schemes = pytest.mark.parametrize("scheme", SOME, ids=lambda scheme: f"{scheme.name}-g{scheme.group_size}")


def formula(tensor: QuantTensor, scheme: Scheme) -> np.ndarray:
    """The weights in float64, as format.scales says."""
    codes = tensor.codes.astype(np.float64)
    groups = np.arange(codes.shape[1]) // scheme.group_size
    scales = tensor.scales.astype(np.float64)[:, groups]
    if scheme.scales == SYMMETRIC:
        return scales * (codes - 2 ** (scheme.bits - 1))
    biases = tensor.biases.astype(np.float64)[:, groups]
    if tensor.units is None:
        return scales * codes + biases
    units = tensor.units.astype(np.float64)[:, np.arange(codes.shape[1]) // scheme.scales.superblock]
    return units[..., 0] * scales * codes - units[..., 1] * biases


def matrix(n: int = 24, k: int = 512) -> tuple[np.ndarray, np.ndarray]:
    """Weights of outliers, and the moments of inputs that go together."""
    rng = np.random.default_rng(5)
    inputs = rng.normal(0, 1, (1500, 24)) @ rng.normal(0, 1, (24, k)) + rng.normal(0, 0.7, (1500, k))
    inputs *= rng.lognormal(0, 0.7, k)
    return rng.standard_t(8, (n, k)).astype(np.float32) / 30, inputs.T @ inputs / len(inputs)


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize(
    ("group", "k", "found"),
    [
        (128, 512, {"pairs": (128, PAIRS), "single": (64, SYMMETRIC), "levels": (64, Scales(4, True, 256))}),
        (64, 512, {"pairs": (64, PAIRS), "single": (32, SYMMETRIC), "levels": (32, LEVELS)}),
        (64, 576, {"pairs": (64, PAIRS), "single": (32, SYMMETRIC), "levels": (32, Scales(6, True, 576))}),
        (64, 2880, {"pairs": (64, PAIRS), "single": (32, SYMMETRIC), "levels": (32, Scales(6, True, 960))}),
        (64, 13696, {"pairs": (64, PAIRS), "single": (32, SYMMETRIC)}),
        (32, 256, {"pairs": (32, PAIRS), "single": (16, SYMMETRIC), "levels": (16, LEVELS)}),
        (16, 256, {"pairs": (16, PAIRS)}),
    ],
)
def test_no_way_takes_more_bytes(bits: int, group: int, k: int, found: dict[str, tuple[int, Scales]]) -> None:
    there = ways(Scheme(bits, group), k, EVERYTHING)
    assert {way(each.scales): (each.group_size, each.scales) for each in there} == found
    sizes = [Matrix(16, k, each.bits, each.group_size, scales=each.scales).bytes for each in there]
    assert max(sizes) == sizes[0]


@pytest.mark.parametrize("k", [512, 896])
@schemes
def test_scales_are_as_the_format_says_and_lose_less(scheme: Scheme, k: int) -> None:
    """The limits are a little above what was measured."""
    weight, _ = matrix(k=k)
    losses = {}
    for each in ways(scheme, weight.shape[1], EVERYTHING):
        tensor = quantize(weight, each)
        found = dequantize(tensor, each.group_size, each.scales)
        np.testing.assert_allclose(found, formula(tensor, each), rtol=0, atol=2e-7)
        assert tensor.codes.max() < 2**scheme.bits
        if each.scales.superblock:
            assert tensor.scales.max() < 2**each.scales.bits
            assert tensor.biases.max() < 2**each.scales.bits
        losses[way(each.scales)] = float(np.square(found - weight).sum())
    assert losses["single"] < 1.06 * losses["pairs"]
    assert losses["levels"] < 0.88 * losses["pairs"]


@pytest.mark.parametrize("k", [512, 896])
@schemes
def test_calibration_loses_less_in_every_way(scheme: Scheme, k: int) -> None:
    weight, moments = matrix(k=k)
    curvature = Curvature.of(moments)
    for each in ways(scheme, weight.shape[1], EVERYTHING):
        tensors = [
            quantize(weight, each),
            quantize(weight, each, "w", curvature.importance),
            quantize_second_order(weight, each, "w", curvature),
        ]
        for tensor in tensors:
            found = dequantize(tensor, each.group_size, each.scales)
            np.testing.assert_allclose(found, formula(tensor, each), rtol=0, atol=2e-7)
        fast, good, best = (dequantize(tensor, each.group_size, each.scales) for tensor in tensors)
        diagonal = curvature.importance
        assert np.square(weight - good).sum(0) @ diagonal < np.square(weight - fast).sum(0) @ diagonal
        assert error(weight, best, curvature.moments) < 0.6 * error(weight, good, curvature.moments)


@pytest.mark.parametrize("value", [0.0, 1.0, -0.3, 1e-5, 3e4, -6e4])
def test_constant_groups_and_groups_beside_larger_ones(value: float) -> None:
    """One superblock of a constant beside one whose first group is much smaller than the others."""
    weight = np.full((2, 512), value, np.float32)
    weight[:, 256:288] /= 1000
    for scheme in (Scheme(4, 32, SYMMETRIC), Scheme(4, 32, LEVELS)):
        found = dequantize(quantize(weight, scheme), scheme.group_size, scheme.scales)
        np.testing.assert_allclose(found[:, :256], weight[:, :256], rtol=2e-3, atol=3.1e-5)
        largest = np.abs(weight).max()
        assert np.abs(found - weight).max() <= largest / 60 + 3.1e-5
        if value == 0:
            assert not found.any()


def test_slices_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _ = matrix()
    for scheme in (Scheme(3, 32, SYMMETRIC), Scheme(3, 32, LEVELS)):
        whole = quantize(weight, scheme)
        with monkeypatch.context() as patch:
            patch.setattr("nearfar.build.weights.quantize.SLICE_WEIGHTS", 5 * weight.shape[1])
            sliced = quantize(weight, scheme)
        for part in ("words", "scales", "biases", "units"):
            np.testing.assert_array_equal(getattr(whole, part), getattr(sliced, part))


def test_solved_tensors_keep_both_levels() -> None:
    weight, _ = matrix()
    scheme, solved = Scheme(4, 32, LEVELS), Solved()
    solved.put("w", quantize(weight, scheme))
    found = dequantize(solved["w"][slice(3, 9)], 32, LEVELS)
    np.testing.assert_array_equal(found, dequantize(quantize(weight[3:9], scheme), 32, LEVELS))


def opened(folder: Path, quality: Quality, scales: tuple[str, ...] | None, *targets: str) -> Source:
    """A checkpoint of floats, whose rows have 256 and 192 inputs, as the targets together may store it."""
    root = folder / "model"
    if not root.exists():
        config = {**CONFIG, "hidden_size": 256, "head_dim": 64}
        write(root, config, weights(config))
    options = BuildOptions(str(root), folder, targets, quality=quality, scales=scales)
    source = open_source(options)
    check_quality(options, source)
    return with_storable(options, source, {name: target_of(name).held for name in targets})


def stored(source: Source) -> dict[int, set[str]]:
    """How matrices are stored, by their number of inputs."""
    found: dict[int, set[str]] = {}
    for each in source.matrices.values():
        found.setdefault(each.k, set()).add(way(each.scales))
    return found


def test_fast_takes_the_first_way_that_fits(tmp_path: Path) -> None:
    asked = {
        None: {256: {"pairs"}, 192: {"pairs"}},
        ("levels",): {256: {"levels"}, 192: {"pairs"}},
        ("levels", "single"): {256: {"levels"}, 192: {"single"}},
        ("single", "levels"): {256: {"single"}, 192: {"single"}},
    }
    plain = opened(tmp_path, "fast", None, "cpu")
    for names, expected in asked.items():
        source = opened(tmp_path, "fast", names, "cpu")
        assert stored(source) == expected
        sizes = [sum(each.bytes for each in one.matrices.values()) for one in (source, plain)]
        assert sizes[0] == sizes[1]


def test_calibrated_builds_choose_from_what_all_targets_have(tmp_path: Path) -> None:
    def names(*targets: str) -> set[str]:
        return {way(scales) for scales in opened(tmp_path, "good", None, *targets).storable.scales}

    assert names("cpu") == set(WAYS)
    assert names("cpu", "mlx") == {"pairs"}
    assert names("cpu", "webgpu") == {way(scales) for scales in target_of("webgpu").held.scales}
    assert opened(tmp_path, "fast", None, "cpu").storable == StorableMatrices.pairs()


def test_what_a_target_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="--scales levels: target mlx stores pairs only: leave levels out"):
        opened(tmp_path, "good", ("pairs", "levels"), "cpu", "mlx")
    with pytest.raises(BuildError, match="unknown --scales triples: use pairs, single, levels"):
        opened(tmp_path, "fast", ("triples",), "cpu")
    with pytest.raises(BuildError, match=r"unknown --scales \(none\)"):
        storable((), {"cpu": EVERYTHING})


def test_scales_that_are_kept_are_not_chosen(tmp_path: Path) -> None:
    options = BuildOptions(str(gptq().write(tmp_path / "x")), tmp_path, ("cpu",), scales=("levels",))
    with pytest.raises(BuildError, match=r"x \(GPTQ\) keeps its codes and scales: leave --scales out"):
        check_quality(options, open_source(options))
    options = replace(options, requantize="none")
    with pytest.raises(BuildError, match="--scales levels is for quantized weights"):
        check_quality(options, open_source(options))
