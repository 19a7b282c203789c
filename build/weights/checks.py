"""Checks that a checkpoint's tensors are those that its config describes, and are finite."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nearfar.build.weights.container import Checkpoint
from nearfar.errors import CheckpointError
from nearfar.kernels.quantized import Array

if TYPE_CHECKING:  # the formats import opening.py, which imports this module
    from nearfar.build.weights.quantized.contract import RequiredTensor

NAMED_FINDINGS = 40  # findings of each kind in one error message
PIECE = 8 << 20  # the number of values that are checked at a time


def check_tensors(
    checkpoint: Checkpoint, expected: Mapping[str, RequiredTensor], ignorable: Iterable[str] = ()
) -> None:
    r"""Compare the tensors with the expected names, shapes and dtypes; name every difference in one
    CheckpointError.

    `ignorable` are regular expressions of extra names that do no harm (as `.*rotary_emb\.inv_freq`).
    """
    patterns = [re.compile(pattern) for pattern in ignorable]
    shapes = {name: entry.shape for name, entry in checkpoint.entries.items()}
    dtypes = {name: entry.dtype.name for name, entry in checkpoint.entries.items()}
    missing = [
        f"{name} {wanted.in_weights(wanted.shape)}" for name, wanted in expected.items() if name not in shapes
    ]
    extra = [
        f"{name} {list(shape)}"
        for name, shape in shapes.items()
        if name not in expected and not any(pattern.fullmatch(name) for pattern in patterns)
    ]
    misshapen = [
        f"{name} is {wanted.in_weights(shapes[name])}, not {wanted.in_weights(wanted.shape)}"
        for name, wanted in expected.items()
        if name in shapes and shapes[name] != tuple(wanted.shape)
    ]
    mistyped = [
        f"{name} is {dtypes[name]}, not {' or '.join(wanted.dtypes)}"
        for name, wanted in expected.items()
        if name in dtypes and dtypes[name] not in wanted.dtypes
    ]
    kinds = (("missing", missing), ("extra", extra), ("misshapen", misshapen), ("of another dtype", mistyped))
    if any(found for _, found in kinds):
        lines = [f"  {len(found)} {kind}: {some(found)}" for kind, found in kinds if found]
        raise CheckpointError(
            f"{checkpoint.path}: the tensors are not those that {checkpoint.config_source} describes:\n"
            + "\n".join(lines)
            + f"\n{checkpoint.mismatch_advice}"
        )


def check_finite(name: str, array: Array) -> None:
    """Raise CheckpointError for NaN and Inf, with the tensor, their count and the first index."""
    flat = array.reshape(-1)
    count, first = 0, -1
    for start in range(0, flat.size, PIECE):
        bad = _not_finite(flat[start : start + PIECE])
        if bad is not None:
            first = start + int(bad.argmax()) if first < 0 else first
            count += int(bad.sum())
    if count:
        index = [int(extent) for extent in np.unravel_index(first, array.shape)]
        raise CheckpointError(
            f"tensor {name!r} holds {count:,} NaN or Inf of {flat.size:,} values, the first at {index}: "
            "the checkpoint is damaged, download or export it again"
        )


def _not_finite(flat: Array) -> npt.NDArray[np.bool_] | None:
    """The mask of NaN and Inf in a vector, None where it has none. It works on the bits, since isfinite is
    slow for bfloat16.
    """
    exponent = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}.get(flat.dtype.name)
    if exponent is None:
        bad = ~np.isfinite(flat)
    else:
        bits: npt.NDArray[np.unsignedinteger[Any]] = flat.view(f"u{flat.itemsize}")
        bad = np.bitwise_and(bits, bits.dtype.type(exponent)) == exponent
    return bad if bad.any() else None


def some(findings: list[str]) -> str:
    """Join the findings in one line; beyond NAMED_FINDINGS only their number is given."""
    rest = len(findings) - NAMED_FINDINGS
    return ", ".join(findings[:NAMED_FINDINGS]) + (f" and {rest} more" if rest > 0 else "")
