"""Writes build/weights/quantized/gguf_grids.json: the tables of ggml's types IQ1, IQ2 and IQ3, from the
installed package gguf.

    python scripts/freeze_grids.py

The tables are a part of the format: a file holds indices into them. A test compares the file with the
package.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

from nearfar.build.weights.quantized.gguf_grids import TABLES

TYPES = ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
"""The types with a table of their own."""


def frozen() -> dict[str, Any]:
    """For each type its values, how many of them an entry has, and the places of all values in base64, two in
    each byte.
    """
    from gguf import quants

    found: dict[str, Any] = {}
    for name in TYPES:
        kind = getattr(quants, name)
        kind.init_grid()
        rows, width = kind.grid_shape
        grid = np.asarray(kind.grid).reshape(rows, width).astype(int)
        values = sorted({int(value) for value in grid.ravel()})
        places = np.searchsorted(values, grid).astype(np.uint8).reshape(-1, 2)
        text = base64.b64encode((places[:, 0] | places[:, 1] << 4).tobytes()).decode()
        found[name] = {"values": values, "width": width, "places": text}
    return found


def main() -> None:
    """Write the file."""
    TABLES.write_text(json.dumps(frozen(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
