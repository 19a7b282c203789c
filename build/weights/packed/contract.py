"""What a build asks of matrices that are quantized already: one file a format implements it.

A format gives two readings of a matrix's rows: `carry`, the checkpoint's own integers in our affine layout,
and `weights`, the floats that they stand for, which are then quantized anew. Which of them a build takes, and
what became of each matrix, is kept in the manifest in the words of nearfar.format.manifest.CARRIED.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from nearfar.build.weights.quantize import F32, Scheme
from nearfar.kernels.codes import BITS
from nearfar.kernels.quantized import GROUPS, QuantTensor

Shape = tuple[int, ...]
FINER = 2
"""Bits more of codes that are made anew because a target lacks the groups of the checkpoint."""
FLOATS = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True)
class Wanted:
    """A tensor that must be there: its shape, and the names of dtypes that it may have."""

    shape: Shape
    dtypes: tuple[str, ...] = FLOATS


@dataclass(frozen=True)
class Carried:
    """Rows with the checkpoint's own codes. `step`: by how much of a step (the distance of two codes) a
    weight differs at most from what the checkpoint says, 0: not at all; `rounded`: how many scales and biases
    float16 does not hold exactly.
    """

    rows: QuantTensor
    step: float = 0.0
    rounded: int = 0


class Packed(Protocol):
    """The quantized matrices of one checkpoint; made by a format's `of`, which has read the settings.

    Matrices have the names that they have in the plain model: `X.weight`, also where no tensor is called so.
    """

    @property
    def name(self) -> str:
        """What the format is called in messages, such as AWQ."""
        ...

    @property
    def scheme(self) -> Scheme | None:
        """What most matrices are stored in, and what others are requantized to; None where no matrix can be
        carried over: then the checkpoint is quantized as one of floats is.
        """
        ...

    @property
    def tensors(self) -> Mapping[str, Scheme | None]:
        """The quantized matrices, each with what holds its codes exactly; None: nothing does."""
        ...

    def kind(self, tensor: str) -> str:
        """What a quantized matrix is stored as, in the words of the format: Q6_K, GPTQ q4 in groups of 32."""
        ...

    def expected(self, plain: Mapping[str, Shape]) -> dict[str, Wanted]:
        """The tensors that must be there, for the shapes of the plain model: of `tensors` and of others."""
        ...

    def harmless(self, plain: Mapping[str, Shape]) -> Collection[str]:
        """Tensors beside those expected that change nothing, such as biases that are all zero."""
        ...

    def entries(self, tensor: str) -> tuple[str, ...]:
        """The checkpoint's tensors that hold a matrix."""
        ...

    def carry(self, tensor: str, start: int, stop: int) -> Carried:
        """Rows [start, stop) of a matrix whose scheme is not None, in that scheme's bits, and in groups of
        its size or a multiple of it. CheckpointError where what is stored makes no sense.
        """
        ...

    def weights(self, tensor: str, start: int, stop: int) -> F32:
        """Rows [start, stop) as floats [stop - start, k]; errors as `carry`."""
        ...


def scheme_for(bits: int, group: int, k: int) -> Scheme | None:
    """What holds codes of so many bits in groups of so many of k inputs: the fewest bits that do, and the
    largest groups that divide those; None where there is none.
    """
    wide = min((b for b in BITS if b >= bits), default=None)
    if wide is None:
        return None
    found = [Scheme(wide, size) for size in GROUPS if group % size == 0]
    return max((s for s in found if s.fits(k)), key=lambda s: s.group_size, default=None)


def held_in(scheme: Scheme, groups: Collection[int]) -> Scheme | None:
    """What holds the codes of a scheme as they are where there are groups of these sizes alone: the largest
    that divide its own; None where none does.
    """
    found = [size for size in groups if scheme.group_size % size == 0]
    return Scheme(scheme.bits, max(found)) if found else None


def finer(scheme: Scheme, groups: Collection[int]) -> Scheme | None:
    """What codes of a scheme become where its groups are not: at least two bits more in the smallest groups
    that there are; None where no codes have so many.

    A group of 32 spans two of 16. With two bits more its step is a quarter of the larger of theirs, or a
    little more where their offsets lie apart: a weight changes by an eighth of a step of the checkpoint's
    codes, whose own error is up to a half.
    """
    wide = min((bits for bits in BITS if bits >= scheme.bits + FINER), default=None)
    return None if wide is None else Scheme(wide, min(groups))


def joint(schemes: Iterable[Scheme]) -> Scheme:
    """What holds the codes of all these as they are: the most bits, the smallest group."""
    found = list(schemes)
    return Scheme(max(scheme.bits for scheme in found), min(scheme.group_size for scheme in found))


def most_common(schemes: Iterable[Scheme | None]) -> Scheme | None:
    """The scheme that most of them are, None where there is none."""
    found = [scheme for scheme in schemes if scheme is not None]
    return max(dict.fromkeys(found), key=found.count, default=None)
