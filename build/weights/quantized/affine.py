"""Base classes of affine formats, like ours: w = scale · code + bias for a group of consecutive inputs. A
format gives its codes, scales and biases; carrying them over and dequantizing is the same for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.build.weights.container import Checkpoint
from nearfar.build.weights.quantize import F32, LARGEST, Scheme
from nearfar.build.weights.quantized.contract import Carried, RequiredTensor, Shape, most_common
from nearfar.errors import CheckpointError
from nearfar.format.scales import PAIRS, TABLES, VALUE_BITS, Scales, Table
from nearfar.kernels.quantized import QuantTensor

Floats = npt.NDArray[np.floating[Any]]
F16 = npt.NDArray[np.float16]

SMALLEST = 2.0**-14
"""The smallest normal float16: a smaller step counts as this, since errors below it do not matter."""


@dataclass(frozen=True)
class Levels:
    """Scales and biases in two levels, as QuantTensor has them: uint8 [n, groups], and float16 [n,
    superblocks, 2].
    """

    scales: npt.NDArray[np.uint8]
    biases: npt.NDArray[np.uint8]
    units: F16

    def reshape(self, n: int) -> Levels:
        """Read values that were read by blocks as those of n rows."""
        scales, biases = self.scales.reshape(n, -1), self.biases.reshape(n, -1)
        return Levels(scales, biases, self.units.reshape(n, -1, 2))


@dataclass(frozen=True)
class Affine:
    """Rows of a matrix: `codes` uint8 [n, k], `scales` and `biases` [n, groups] float32 or float64, exactly
    as the checkpoint has them: groups of k/groups consecutive inputs.
    """

    codes: npt.NDArray[np.uint8]
    scales: Floats
    biases: Floats
    levels: Levels | None = None
    """The scales and biases as the checkpoint stores them, if it does so in two levels."""
    table: Table | None = None
    """The table whose values codes stand for; biases are then zeros."""

    @property
    def linear(self) -> Affine:
        """The rows without a table: codes are its values, plus 128."""
        if self.table is None:
            return self
        zero = 1 << (VALUE_BITS - 1)
        values = (np.array(TABLES[self.table], np.int16) + zero).astype(np.uint8)
        biases = self.scales * np.float32(-zero)
        return replace(self, codes=values[self.codes], biases=biases, table=None)

    def weights(self) -> F32:
        """Dequantize to float32 [n, k]; computed in float64, since biases can nearly cancel products."""
        if self.table is not None:
            return self.linear.weights()
        n, k = self.codes.shape
        wide = self.codes.reshape(n, self.scales.shape[1], -1).astype(np.float64)
        wide *= self.scales[..., None].astype(np.float64)
        wide += self.biases[..., None].astype(np.float64)
        return wide.reshape(n, k).astype(np.float32)

    def carried(self, bits: int, name: str, how: Scales = PAIRS) -> Carried:
        """The rows with float16 scales and biases, and the error of that rounding; errors as `near`. If `how`
        has two levels, the rows are as the checkpoint has them; if it has no table, a table's values are the
        codes.
        """
        if self.table != how.table:
            return self.linear.carried(VALUE_BITS, name, how)
        if how.superblock:
            assert self.levels is not None, name
            units = self.levels.units
            if not np.isfinite(units).all():
                row = int(np.argwhere(~np.isfinite(units))[0][0])
                raise CheckpointError(
                    f"tensor {name!r} has scales of superblocks that are not finite, such as in row {row} of "
                    "a slice: the file is damaged, download or convert it again"
                )
            codes = self.levels.scales, self.levels.biases
            return Carried(QuantTensor.of_codes(self.codes, *codes, bits, units))
        (scales, biases), change, rounded = near(self.scales, self.biases, bits, name)
        if not how.offsets:
            rounded = int(np.count_nonzero(scales != self.scales))
        return Carried(QuantTensor.of_codes(self.codes, scales, biases, bits), change, rounded)


def near(scales: Floats, biases: Floats, bits: int, name: str) -> tuple[tuple[F16, F16], float, int]:
    """Round scales and biases [n, groups] of `bits`-bit codes to float16.

    Also gives by how much of a step a weight changes at most, and how many scales and biases changed. Raises
    CheckpointError where they are not finite or beyond float16.
    """
    wide = scales.astype(np.float64), biases.astype(np.float64)
    for what, values in zip(("scales", "biases"), wide, strict=True):
        good = np.isfinite(values) & (np.abs(values) <= LARGEST)
        if not good.all():
            row, group = (int(i) for i in np.argwhere(~good)[0])
            raise CheckpointError(
                f"tensor {name!r} has {what} that are not finite or beyond float16 (65504), in which they "
                f"are stored, such as {values[row, group]:g} of group {group}: convert the original "
                "checkpoint again, or build with --requantize none"
            )
    half = wide[0].astype(np.float16), wide[1].astype(np.float16)
    ds, db = (h.astype(np.float64) - w for h, w in zip(half, wide, strict=True))
    # A weight's error is linear in its code, so it is largest at the first code or the last.
    error = np.maximum(np.abs(db), np.abs(ds * (2**bits - 1) + db))
    change = float((error / np.maximum(np.abs(wide[0]), SMALLEST)).max(initial=0.0))
    return half, change, int(np.count_nonzero(ds)) + int(np.count_nonzero(db))


class Format(ABC):
    """The part of `Quantized` that all formats share. `wanted` names the tensors that hold a matrix."""

    name: str

    def __init__(self, checkpoint: Checkpoint, tensors: Mapping[str, Scheme | None]) -> None:
        self.checkpoint = checkpoint
        self.tensors = tensors
        self._held: dict[str, tuple[str, ...]] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """No lines, unless a format overrides this."""
        return ()

    @property
    def scheme(self) -> Scheme | None:
        """The most common scheme of the matrices."""
        return most_common(self.tensors.values())

    def kind(self, tensor: str) -> str:
        """The format's name and the scheme that holds the codes, where one does."""
        scheme = self.tensors[tensor]
        return self.name if scheme is None else f"{self.name} {scheme.label}"

    @abstractmethod
    def wanted(self, base: str, n: int, k: int) -> dict[str, RequiredTensor]:
        """The tensors that hold the matrix `base.weight` [n, k]."""

    def expected(self, plain: Mapping[str, Shape]) -> dict[str, RequiredTensor]:
        """The expected entries of quantized matrices, and of plain tensors."""
        out: dict[str, RequiredTensor] = {}
        for name, shape in plain.items():
            if name in self.tensors and len(shape) == 2:
                out |= self.wanted(base_of(name), *shape)
            else:
                out[name] = RequiredTensor(shape)
        return out

    def harmless(self, plain: Mapping[str, Shape]) -> Collection[str]:
        """No tensors, unless a format overrides this."""
        return ()

    def entries(self, tensor: str) -> tuple[str, ...]:
        """The entries that belong to the tensor's module, without its bias."""
        base = base_of(tensor)
        if base not in self._held:
            inside = (name for name in self.checkpoint.entries if name.startswith(f"{base}."))
            self._held[base] = tuple(name for name in inside if name != f"{base}.bias")
        return self._held[base]

    def carry(self, tensor: str, start: int, stop: int, scales: Scales = PAIRS) -> Carried:
        """Carry nothing over, unless a format overrides this."""
        raise NotImplementedError(tensor)

    @abstractmethod
    def weights(self, tensor: str, start: int, stop: int) -> F32:
        """See Quantized."""


class AffineFormat(Format):
    """A format whose matrices are affine."""

    @abstractmethod
    def affine(self, base: str, start: int, stop: int) -> Affine:
        """Rows of the matrix `base.weight`, in groups of consecutive inputs."""

    def carry(self, tensor: str, start: int, stop: int, scales: Scales = PAIRS) -> Carried:
        """The checkpoint's codes, with scales and biases in float16, or as the checkpoint has them."""
        scheme = self.tensors[tensor]
        assert scheme is not None, tensor
        return self.affine(base_of(tensor), start, stop).carried(scheme.bits, tensor, scales)

    def weights(self, tensor: str, start: int, stop: int) -> F32:
        """The dequantized rows."""
        return self.affine(base_of(tensor), start, stop).weights()


def base_of(tensor: str) -> str:
    """The module that a matrix belongs to: its name without `.weight`."""
    return tensor.removesuffix(".weight")


def whole(base: str, count: int, what: str, unit: int) -> int:
    """Count whole units. Raises CheckpointError for a remainder, which no valid checkpoint has."""
    if count % unit:
        raise CheckpointError(
            f"{base}.weight has {count} {what}, no multiple of {unit}, and cannot be stored in this format: "
            "config.json and the weights do not belong together, download both again"
        )
    return count // unit
