"""Packed codes: MLX's layout, there and back."""

import numpy as np
import pytest

from nearfar.format.scales import CODE_BITS
from nearfar.kernels.codes import pack_codes, unpack_codes

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("bits", CODE_BITS)
def test_there_and_back(bits: int) -> None:
    codes = RNG.integers(0, 2**bits, (5, 96)).astype(np.uint8)
    words = pack_codes(codes, bits)
    assert words.shape == (5, 96 * bits // 32)
    np.testing.assert_array_equal(unpack_codes(words, bits), codes)


@pytest.mark.parametrize("bits", CODE_BITS)
def test_a_code_lies_at_its_bit_of_the_little_endian_words(bits: int) -> None:
    codes = RNG.integers(0, 2**bits, (1, 64)).astype(np.uint8)
    number = int.from_bytes(pack_codes(codes, bits).astype("<u4").tobytes(), "little")
    assert [(number >> (bits * i)) & (2**bits - 1) for i in range(64)] == codes[0].tolist()


@pytest.mark.parametrize("bits", CODE_BITS)
def test_mlx_unpacks_the_same_codes(bits: int) -> None:
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    codes = RNG.integers(0, 2**bits, (3, 128)).astype(np.uint8)
    ones, zeros = mx.ones((3, 2)), mx.zeros((3, 2))
    found = mx.dequantize(mx.array(pack_codes(codes, bits)), ones, zeros, group_size=64, bits=bits)
    np.testing.assert_array_equal(np.array(found), codes)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", CODE_BITS)
def test_what_mlx_quantizes_is_read(bits: int, group: int) -> None:
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    words, scales, biases = mx.quantize(
        mx.array(RNG.standard_normal((4, 256)).astype(np.float32)), group, bits
    )
    codes = unpack_codes(np.array(words), bits).reshape(4, -1, group).astype(np.float32)
    assert codes.max() == 2**bits - 1
    found = codes * np.array(scales)[..., None] + np.array(biases)[..., None]
    want = np.array(mx.dequantize(words, scales, biases, group, bits)).reshape(found.shape)
    np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-6)
