"""Numbers for products in float16: codes minus their middle, and rows scaled so that no sum overflows.

A code c of b bits becomes c - 2^(b-1), which a float16 holds; scale and bias are applied to the sums. Eight
inputs of a row are multiplied by a power of two so that they are below `limit`: eight products of them with
codes add up to at most 8 · 2^(b-1) · 2^(13-b) = 32,768, whatever the inputs are. Among eight inputs, those
below 2^-(27-b) of the largest (a subnormal float16) lose bits; the power of two is multiplied back in
float32.

So the sum of eight inputs is as exact as 11 bits of the largest of them. If that one is by far the largest, a
channel of massive activations, the others are lost in it, and its rounding error shows if it adds little in
the end. Such groups of eight are `lopsided`; the products of float32 rows compute them in float32.
"""

# mypy: ignore-errors
# TVMScript: what is built here are expressions.
from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import reduce

from tvm.script import tirx as T

from nearfar.kernels.quantized import Matrix
from nearfar.targets.gpu.kernels.common import MANTISSA
from nearfar.targets.gpu.kernels.script.vectors import HALF_WORD, WIDTH, at, spread, total
from nearfar.targets.gpu.packing import PLANES, SIGN_BIT
from nearfar.targets.gpu.tir_passes import SELDOM

CHAIN = 8
"""Inputs whose products are added in float16, and which are scaled together."""
THOUSAND = 0x6400  # the float16 of 1,024, whose last bit is worth 1
EXPONENT = 0xFF << MANTISSA
DENSE_LIMIT = 12
"""Exponent of the limit for weights without codes, whose products are float32."""
LEAST_EXPONENT = 32
"""The least exponent in a float32's bits: inputs below 2^-94 are scaled as if they were 2^-94."""


FAR = 8 << MANTISSA
LOPSIDED = CHAIN * 5 << MANTISSA
"""Threshold for sums of exponent differences, as bits of exponents; see lopsided."""


def limit_of(bits: int) -> int:
    """Exponent of the limit for eight scaled inputs, with codes of `bits` bits."""
    return 13 - bits if bits <= 8 else DENSE_LIMIT


def exponent_of(bits, values: list):
    """The largest exponent of vectors of float32, at its place in a float32's bits; `bits`: a local array of
    one vector of uint32.
    """
    fields = [T.reinterpret(f"uint32x{WIDTH}", value) & _all(EXPONENT) for value in values]
    T.buffer_store(bits, reduce(T.max, fields), [0])
    return reduce(T.max, [at(bits[0], place) for place in range(WIDTH)], T.uint32(LEAST_EXPONENT << MANTISSA))


def factor_of(exponent, limit: int):
    """The power of two, float32, that scales numbers with this exponent (see exponent_of) to below
    2^limit.
    """
    return T.reinterpret("float32", T.uint32((limit + 253) << MANTISSA) - exponent)


def inverse_of(exponent, limit: int):
    """The inverse of factor_of."""
    return T.reinterpret("float32", exponent - T.uint32((limit - 1) << MANTISSA))


def lopsided(bits, exponent, values: list):
    """Whether eight inputs are far below the largest, whose exponent is `exponent` (`bits` as in
    exponent_of).

    They are if they are smaller by a factor of 2^5 or more in the geometric mean, with factors above 2^8
    counted as 2^8. Then one to three of the eight are larger than the others by 2^6 and more. Among eight
    normal numbers this happens once in 500,000.
    """
    below = [
        T.min(spread(exponent) - (T.reinterpret(f"uint32x{WIDTH}", value) & _all(EXPONENT)), _all(FAR))
        for value in values
    ]
    T.buffer_store(bits, reduce(operator.add, below), [0])
    return total(bits[0]) >= T.uint32(LOPSIDED)


def seldom():
    """Mark statements that few inputs need: figures, which do not know a kernel's data, leave them out."""
    return T.attr(T.int32(0), SELDOM, 1)


def words_of(matrix: Matrix) -> int:
    """The number of vectors of the local array that `centred` works in."""
    return len(PLANES[matrix.bits]) + 1 if matrix.quantized else 1


def centred(held, matrix: Matrix, made: int, word, first) -> Iterator[tuple[int, object]]:
    """Yields the codes of `made` inputs from `first` on, minus their middle: the input's index, and
    float16x4.

    Use each before the next; `word` is as Slices reads it, `held` a local array of words. Codes are packed in
    order; the second half of a thread's codes is moved into the word's high half, so that two are masked at a
    time and become the last bits of two float16 of 1,024 and more.
    """
    planes = PLANES[matrix.bits]
    in_word = min(made, 32 // max(planes))
    middle = T.Broadcast(T.float16(1024 + (1 << (matrix.bits - 1))), WIDTH)
    for start in range(0, made, in_word):
        before = 0
        for i, width in enumerate(planes):
            whole = word[before + start * width // 32]
            whole = whole ^ _all(int(SIGN_BIT)) if len(planes) == 1 else whole
            T.buffer_store(held, _spaced(whole, first + start, width, in_word), [i])
            before += max(made * width // 32, 1)
        for j in range(in_word // 2):
            T.buffer_store(held, _pair(held, planes, j), [len(planes)])
            for half in range(2):
                yield start + half * (in_word // 2) + j, _halves(held[len(planes)], half) - middle


def _pair(held, planes: tuple[int, ...], j: int):
    """Two codes of words made by _spaced, each as the bits of the float16 1,024 plus the code."""
    made, below = _all(THOUSAND | THOUSAND << HALF_WORD), 0
    for i, width in enumerate(planes):
        mask = (1 << width) - 1
        part = held[i] if j == 0 else T.shift_right(held[i], _all(j * width))
        part = part & _all(mask | mask << HALF_WORD)
        made = made | (T.shift_left(part, _all(below)) if below else part)
        below += width
    return made


def _halves(words, which: int):
    """The float16 in the low (0) or high (1) half of each word."""
    pairs = [
        T.reinterpret(f"float16x{WIDTH}", T.Shuffle([words], [first, first + 1])) for first in (0, WIDTH // 2)
    ]
    return T.Shuffle(pairs, list(range(which, 2 * WIDTH, 2)))


def _spaced(word, first, width: int, count: int):
    """The codes of `count` inputs of a word: the first half from bit 0 on, the second half from bit 16 on."""
    if count * width == 2 * HALF_WORD:
        return word
    shift = T.Cast("uint32", first % (32 // width) * width)
    held = T.shift_right(word, spread(shift)) & _all((1 << count * width) - 1)
    return held | T.shift_left(held, _all(HALF_WORD - count // 2 * width))


def _all(word: int):
    return spread(T.uint32(word))
