"""Four-bit floats e2m1 (OCP Microscaling Formats, 2023): a sign, and 0, 0.5, 1, 1.5, 2, 3, 4 or 6.

Twice a value is an integer from -12 to 12, so that with a scale they are affine codes of five bits:
v · s = (s / 2) · (2v + 12) - 6s, exactly.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nearfar.build.weights.quantized.affine import Affine

E2M1_BITS = 5
TWICE = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.int8)
AFFINE = (np.concatenate([TWICE, -TWICE]) + 12).astype(np.uint8)
"""The affine code of each of the 16 patterns; -0 is 0."""


def e2m1_affine(patterns: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32]) -> Affine:
    """Convert patterns uint8 [n, k] below 16, with one scale for each group [n, groups], to affine codes."""
    return Affine(AFFINE[patterns], scales / np.float32(2), scales * np.float32(-6))
