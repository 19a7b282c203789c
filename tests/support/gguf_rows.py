"""Random rows of GGUF's types, packed for the kernel that looks rows up: it must give what the gguf package
gives, bit for bit.
"""

from __future__ import annotations

from typing import Protocol

import gguf
import numpy as np

from nearfar.build.weights.quantized.contract import held_in
from nearfar.build.weights.quantized.gguf_blocks import BLOCKS, read_rows
from nearfar.format.scales import PAIRS
from nearfar.format.sizes import MAX_STEP
from nearfar.kernels.jobs import Embed
from nearfar.kernels.quantized import Array, Matrix, QuantTensor, StorableMatrices
from tests.support.gguf_files import KINDS, floats, random_rows

ROWS = 37
OWN_BYTES = sorted(kind for kind, block in BLOCKS.items() if block.scales != PAIRS)
"""Types that devices store in the file's own bytes."""


class Packs(Protocol):
    """What packs a matrix for its kernels."""

    def pack(self, matrix: Matrix, tensor: QuantTensor) -> tuple[Array, ...]:
        """Pack a matrix into its parts."""
        ...


def block_size(kind: str) -> int:
    """The number of weights of a block of a type."""
    return int(gguf.GGML_QUANT_SIZES[KINDS[kind]][0])


def embed_job(kind: str, k: int, held: StorableMatrices) -> Embed:
    """A job that looks up ROWS rows of k weights of a type, as a target that can store `held` stores them."""
    exact = BLOCKS[kind].scheme(k)
    assert exact is not None
    scheme = held_in(exact, held)
    assert scheme is not None
    return Embed(ROWS, Matrix(ROWS, k, scheme.bits, scheme.group_size, scales=scheme.scales))


def embed_arrays(packs: Packs, kind: str, matrix: Matrix) -> tuple[dict[str, Array], Array]:
    """The inputs of the job of a matrix, each row once, and the rows that it must give."""
    rows = random_rows(kind, ROWS, matrix.k, seed=matrix.k)
    _, size = gguf.GGML_QUANT_SIZES[KINDS[kind]]
    carried = read_rows(kind, rows, size).carried(matrix.bits, kind, matrix.scales)
    assert (carried.change, carried.rounded) == (0, 0)
    tokens = np.zeros(MAX_STEP, np.int32)
    tokens[:ROWS] = np.arange(ROWS)
    arrays = {f"w{i}": array for i, array in enumerate(packs.pack(matrix, carried.rows))}
    return arrays | {"tokens": tokens}, floats(rows, kind)
