"""The tables in the buffers `rope.<name>`, which rotate queries and keys by their position."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def rope_table(inv_freq: npt.NDArray[Any], scale: float, context: int) -> npt.NDArray[np.float32]:
    """Cosines, then sines, of every position, float32 [context, head_dim]: a buffer `rope.<name>`.

    `scale` multiplies only pairs that rotate; a pair with frequency 0 stays as it is.
    """
    angle = np.arange(context, dtype=np.float64)[:, None] * inv_freq.astype(np.float64)
    factor = np.where(inv_freq == 0, 1.0, scale)
    return np.concatenate([np.cos(angle) * factor, np.sin(angle) * factor], axis=1).astype(np.float32)
