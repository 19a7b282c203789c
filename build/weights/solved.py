"""Stores matrices that a calibration has quantized, in a temporary file, until the weights are streamed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.kernels.quantized import QuantTensor


class Solved:
    """Quantized tensors by their names in the checkpoint. `experts`: the number of matrices of experts;
    `seldom`: how many of them were quantized with equal weights, since too few tokens choose them.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as what is read from it)
        self._tensors: dict[str, QuantTensor] = {}
        self.experts = self.seldom = 0

    def put(self, name: str, tensor: QuantTensor) -> None:
        """Keep a tensor; its arrays are moved to the file."""
        words, scales, biases = map(self._kept, (tensor.words, tensor.scales, tensor.biases))
        units = None if tensor.units is None else self._kept(tensor.units)
        self._tensors[name] = QuantTensor(words, scales, biases, tensor.bits, units)

    def _kept(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Move an array to the file."""
        start = self._file.seek(0, 2)
        start += self._file.write(b"\0" * (-start % 64))
        self._file.write(np.ascontiguousarray(array).data)
        self._file.flush()
        return np.memmap(self._file, array.dtype, "r", start, array.shape)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> QuantTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
