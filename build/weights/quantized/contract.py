"""The interface of quantized checkpoints: each format is one file.

A format gives two readings of a matrix's rows: `carry`, the checkpoint's own integers in our affine layout,
and `weights`, dequantized floats, which are then quantized again. The manifest says for each matrix which one
a build took, in the words of nearfar.format.manifest.CARRIED.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from nearfar.build.weights.quantize import F32, Scheme
from nearfar.format.scales import CODE_BITS, GROUP_SIZES, PAIRS, SYMMETRIC, Scales
from nearfar.kernels.quantized import QuantTensor, StorableMatrices

Shape = tuple[int, ...]
FINER = 2
"""Additional bits of codes that are requantized because a target lacks the checkpoint's groups."""
FLOATS = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True)
class RequiredTensor:
    """A required tensor: its shape, and the names of the dtypes that it may have.

    `block`: the weights of a block and its bytes, for rows that are stored as blocks of bytes.
    """

    shape: Shape
    dtypes: tuple[str, ...] = FLOATS
    block: tuple[int, int] = (1, 1)

    def in_weights(self, stored: Shape) -> list[int]:
        """The shape of a stored tensor in weights, for messages."""
        weights, size = self.block
        return [*stored[:-1], stored[-1] // size * weights] if stored else []


@dataclass(frozen=True)
class Carried:
    """Rows with the checkpoint's own codes. `change`: the largest change of a weight against the checkpoint,
    as a part of the distance of two codes, 0 for none; `rounded`: the number of scales and biases that
    float16 does not hold exactly.
    """

    rows: QuantTensor
    change: float = 0.0
    rounded: int = 0


class Quantized(Protocol):
    """The quantized matrices of one checkpoint; made by a format's `of`, which has read the settings.

    Matrices have the names of the unquantized model, `X.weight`, even if no tensor has that name.
    """

    @property
    def name(self) -> str:
        """The format's name in messages, such as AWQ."""
        ...

    @property
    def scheme(self) -> Scheme | None:
        """The scheme of most matrices, to which others are requantized; None where no matrix can be carried
        over: the checkpoint is then quantized like one of floats.
        """
        ...

    @property
    def tensors(self) -> Mapping[str, Scheme | None]:
        """The quantized matrices, each with the scheme that holds its codes exactly; None where none does."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the user about codes that are carried over."""
        ...

    def kind(self, tensor: str) -> str:
        """How a matrix is quantized, in the format's words: Q6_K, GPTQ q4 in groups of 32."""
        ...

    def expected(self, plain: Mapping[str, Shape]) -> dict[str, RequiredTensor]:
        """The tensors that the checkpoint must have, given the shapes of the unquantized model."""
        ...

    def harmless(self, plain: Mapping[str, Shape]) -> Collection[str]:
        """Further tensors that have no effect, such as biases that are all zero."""
        ...

    def entries(self, tensor: str) -> tuple[str, ...]:
        """The checkpoint's tensors that hold a matrix."""
        ...

    def carry(self, tensor: str, start: int, stop: int, scales: Scales = PAIRS) -> Carried:
        """Rows [start, stop) of a matrix with a scheme, in the scheme's bits, and in groups of its size or a
        multiple of it. `scales`: those of the scheme, or PAIRS. Raises CheckpointError for invalid data.
        """
        ...

    def weights(self, tensor: str, start: int, stop: int) -> F32:
        """Rows [start, stop) dequantized to float32 [stop - start, k]; errors as `carry`."""
        ...


def scheme_for(bits: int, group: int, k: int, centred: bool = False) -> Scheme | None:
    """The scheme that holds codes of `bits` bits in groups of `group` of k inputs: the fewest sufficient
    bits, and the largest group size that divides `group`; None where there is none.

    `centred`: the code 2^(bits - 1) stands for 0 in every group, so that scales need no offsets.
    """
    wide = min((b for b in CODE_BITS if b >= bits), default=None)
    if wide is None:
        return None
    scales = SYMMETRIC if centred and wide == bits else PAIRS
    found = [Scheme(wide, size, scales) for size in GROUP_SIZES if group % size == 0]
    return max((s for s in found if s.fits(k)), key=lambda s: s.group_size, default=None)


def held_in(scheme: Scheme, held: StorableMatrices) -> Scheme | None:
    """The scheme that holds a scheme's codes, or the values of their table, exactly in what a target can
    store: its own, or float16 pairs in the largest groups that divide its own; None where there are none.
    """
    if scheme.group_size in held.groups and scheme.scales in held.scales:
        return scheme
    found = [size for size in held.groups if scheme.group_size % size == 0]
    return Scheme(scheme.linear.bits, max(found)) if found else None


def finer(scheme: Scheme, groups: Collection[int]) -> Scheme | None:
    """The scheme for codes whose group size is not in `groups`: at least two bits more, in the smallest of
    `groups`; None where no scheme has as many bits.

    A group of 32 spans two of 16. With two bits more its step is a quarter of the larger of theirs, or a
    little more where their offsets differ: a weight changes by an eighth of a step of the checkpoint's codes,
    whose own error is up to a half.
    """
    wide = min((bits for bits in CODE_BITS if bits >= scheme.linear.bits + FINER), default=None)
    return None if wide is None else Scheme(wide, min(groups))


def joint(schemes: Iterable[Scheme]) -> Scheme:
    """The scheme that holds the codes of all these schemes exactly: the one that they share, or one with the
    most bits and the smallest group, in float16 scales if all have these, otherwise in float16 pairs.
    """
    found = list(schemes)
    if len(set(found)) == 1:
        return found[0]
    found = [scheme.linear for scheme in found]
    if len(set(found)) == 1:
        return found[0]
    scales = SYMMETRIC if all(scheme.scales == SYMMETRIC for scheme in found) else PAIRS
    return Scheme(max(scheme.bits for scheme in found), min(scheme.group_size for scheme in found), scales)


def most_common(schemes: Iterable[Scheme | None]) -> Scheme | None:
    """The most common scheme, None where there is none."""
    found = [scheme for scheme in schemes if scheme is not None]
    return max(dict.fromkeys(found), key=found.count, default=None)
