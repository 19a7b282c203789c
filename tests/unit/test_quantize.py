"""Quantization: exactly MLX's layout, a smaller error than min-max rounding, and extreme values."""

import ml_dtypes
import numpy as np
import pytest

from nearfar.build.weights.opening import open_checkpoint
from nearfar.build.weights.quantize import Scheme, dequantize, quantize, to_float32
from nearfar.errors import BuildError, CheckpointError
from nearfar.format.scales import CODE_BITS, GROUP_SIZES
from nearfar.kernels.codes import pack_codes, unpack_codes
from tests.shared_data import shared_data

SCHEMES = [Scheme(bits, group) for bits in CODE_BITS for group in GROUP_SIZES]
schemes = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: f"{scheme.name}-g{scheme.group_size}")


def normal(*shape: int, std: float = 0.02) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32) * np.float32(std)


def squared_error(weight: np.ndarray, scheme: Scheme) -> float:
    found = dequantize(quantize(weight, scheme), scheme.group_size)
    return float(((found - weight) ** 2).sum())


def min_max_error(weight: np.ndarray, scheme: Scheme) -> float:
    """Error of rounding each group between its extremes, with exact scales."""
    groups = weight.reshape(-1, scheme.group_size)
    low, top = groups.min(axis=1, keepdims=True), 2**scheme.bits - 1
    step = (groups.max(axis=1, keepdims=True) - low) / top
    return float(((low + step * np.rint((groups - low) / step) - groups) ** 2).sum())


def test_parse() -> None:
    assert Scheme.parse("q4", 32) == Scheme(4, 32)
    assert Scheme.parse("none").name == "none"
    assert not Scheme.parse("none").fits(64)
    assert not Scheme(4, 64).fits(172)
    with pytest.raises(BuildError, match="'q7'"):
        Scheme.parse("q7")
    with pytest.raises(BuildError, match="256"):
        Scheme.parse("q4", 256)
    with pytest.raises(BuildError, match="172 inputs"):
        quantize(normal(2, 172), Scheme(4, 64))


@schemes
def test_beats_min_max(scheme: Scheme) -> None:
    weight = normal(64, 512)
    limits = {2: 0.65, 3: 0.80, 4: 0.88, 5: 0.92, 6: 0.95, 8: 0.98}
    limit = limits[scheme.bits]
    assert squared_error(weight, scheme) < limit * min_max_error(weight, scheme)


@schemes
def test_codes_are_the_nearest_for_the_stored_scales(scheme: Scheme) -> None:
    weight = normal(8, 256)
    tensor = quantize(weight, scheme)
    top = 2**scheme.bits - 1
    scales, biases = (
        np.repeat(a.astype(np.float32), scheme.group_size, axis=1) for a in (tensor.scales, tensor.biases)
    )
    nearest = np.clip(np.rint((weight - biases) / scales), 0, top)
    # at a tie, a rounding of the quotient decides
    assert np.mean(nearest == tensor.codes) > 0.999
    assert tensor.codes.max() <= top


@schemes
def test_mlx_reads_the_same_weights(scheme: Scheme) -> None:
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    tensor = quantize(normal(40, 384), scheme)
    packed, scales, biases = (mx.array(part) for part in (tensor.words, tensor.scales, tensor.biases))
    assert packed.dtype == mx.uint32
    found = mx.dequantize(packed, scales, biases, group_size=scheme.group_size, bits=scheme.bits)
    # mlx computes in the scales' dtype, float16
    np.testing.assert_allclose(np.array(found), dequantize(tensor, scheme.group_size), rtol=2e-3, atol=1e-4)


@schemes
def test_uneven_rows_and_slices_give_the_same(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(37, 384)
    whole = quantize(weight, scheme)
    monkeypatch.setattr("nearfar.build.weights.quantize.SLICE_WEIGHTS", 5 * 384)
    sliced = quantize(weight, scheme)
    for part in ("words", "scales", "biases"):
        np.testing.assert_array_equal(getattr(whole, part), getattr(sliced, part))


@schemes
@pytest.mark.parametrize("value", [0.0, 1.0, -0.3, 1e-5, 3e4])
def test_constant_groups(scheme: Scheme, value: float) -> None:
    weight = np.full((2, 128), value, np.float32)
    found = dequantize(quantize(weight, scheme), scheme.group_size)
    np.testing.assert_allclose(found, weight, rtol=2e-3, atol=3.1e-5)
    if value == 0:
        assert not found.any()


@schemes
def test_no_subnormals_and_tiny_weights_survive(scheme: Scheme) -> None:
    weight = normal(4, 256, std=1e-5)
    tensor = quantize(weight, scheme)
    for part in (tensor.scales, tensor.biases):
        assert not ((part != 0) & (np.abs(part) < 2.0**-14)).any()
    assert (tensor.scales > 0).all()
    assert np.abs(dequantize(tensor, scheme.group_size) - weight).max() <= 2.0**-14


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_other_dtypes_equal_float32(dtype: type) -> None:
    weight = normal(4, 128).astype(dtype)
    np.testing.assert_array_equal(to_float32(weight), weight.astype(np.float32))
    a, b = quantize(weight, Scheme(4, 64)), quantize(weight.astype(np.float32), Scheme(4, 64))
    np.testing.assert_array_equal(a.codes, b.codes)


@pytest.mark.parametrize(
    ("value", "words"),
    [(np.nan, "NaN or Inf"), (np.inf, "NaN or Inf"), (1e6, "beyond float16"), (-7e4, "-70000")],
)
def test_what_float16_cannot_hold_is_named(value: float, words: str) -> None:
    weight = normal(4, 192)
    weight[2, 130] = value
    with pytest.raises(CheckpointError, match=words) as caught:
        quantize(weight, Scheme(4, 64), "model.layers.0.mlp.up_proj.weight")
    assert "model.layers.0.mlp.up_proj.weight: the group at row 2, columns 128 to 191" in str(caught.value)


def test_less_error_than_mlx_on_trained_weights() -> None:
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    checkpoint = open_checkpoint(shared_data("models/classics-7M"))
    weight = to_float32(checkpoint.read("model.layers.3.mlp.down_proj.weight"))
    for scheme in (
        scheme for scheme in SCHEMES if scheme.group_size >= 32
    ):  # mlx does not quantize smaller groups
        parts = mx.quantize(mx.array(weight), group_size=scheme.group_size, bits=scheme.bits)
        theirs = np.array(mx.dequantize(*parts, group_size=scheme.group_size, bits=scheme.bits))
        assert squared_error(weight, scheme) < 0.95 * float(((theirs - weight) ** 2).sum())


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("group", GROUP_SIZES)
def test_what_fits_can_be_packed(bits: int, group: int) -> None:
    """A scheme promises no more than its packing does: codes of 6 bits in rows of 48 are not whole words."""
    scheme, rng = Scheme(bits, group), np.random.default_rng(0)
    for k in (16, 32, 48, 64, 80, 96, 112, 128):
        if scheme.fits(k):
            codes = rng.integers(0, 2**bits, (3, k)).astype(np.uint8)
            assert np.array_equal(unpack_codes(pack_codes(codes, bits), bits), codes)
            quantize(rng.normal(0, 1, (3, k)).astype(np.float32), scheme)
