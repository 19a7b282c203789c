"""The layout of the input and output of quantize_kernel's search; importable without TVM."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

LANES = 16
"""Groups that one loop iteration works on, each in a vector lane. They fill two registers, so that their
dependency chains overlap.
"""
WORD = 16  # bits of a word of packed codes: a group of 16 fills whole words at any number of bits
LARGEST = 65504.0
"""The largest float16."""
PARAMS = (
    "scale",
    "bias",
    "low",
    "high",
    "total",
)  # rows of the kernel's parameters: the group's scale and bias, then its statistics


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
    """Allocate an uninitialised array with the 64-byte alignment that TVM's kernels need."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    first = -raw.ctypes.data % 64
    return raw[first : first + size].view(dtype).reshape(shape)
