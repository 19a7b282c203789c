"""The gated MLPs of the experts that the rows have chosen: hidden values of each pair of a row and one of its
experts, then the weighted sums.

A thread has one column, whose words its neighbours' loads join; a workgroup has a tile of pairs of one expert
(tiles.py). With few rows a tile is one pair, and one launch makes the products by the second matrices and the
sums. With many rows, or where a device cannot bind the second matrices at once, products and sums are two
launches. Matrices that a device cannot bind at once are stored in pieces with some of the experts each: every
piece has a launch, which does nothing for tiles of other pieces' experts, so that a token still reads the
experts that it chose alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from nearfar.kernels.contract import SCRATCH, Stage, Staged
from nearfar.kernels.jobs import Experts
from nearfar.kernels.pieces import MatrixPiece, placed
from nearfar.targets.gpu.kernels.experts.products import hidden, outputs
from nearfar.targets.gpu.kernels.experts.sums import fused, sums
from nearfar.targets.gpu.kernels.experts.tiles import Tiles, tiled
from nearfar.targets.gpu.packing import parts

HIDDEN, PRODUCTS, TILES = (f"{SCRATCH}{i}" for i in range(3))


@lru_cache(maxsize=256)
def experts_in_pieces(
    job: Experts, gate_up: tuple[MatrixPiece, ...], down: tuple[MatrixPiece, ...]
) -> Staged:
    """The launches of an Experts job whose stacks are stored in these pieces."""
    tiles, scratch = Tiles.of(job), [((job.m * job.top, job.inner), "float32")]
    first = _words(gate_up, 0)
    last = _words(down, sum(map(len, first)))
    biases = ["gate_up_bias"] * job.gate_up_bias, ["down_bias"] * job.down_bias
    chosen, stages = "route", []
    if tiles.rows == 1 and len(down) == 1:
        finish = [Stage(fused(job), (HIDDEN, "route", *last[0], *biases[1], "out"))]
    else:
        scratch.append(((job.m * job.top, job.n), "float32"))
        if tiles.rows > 1:
            chosen = TILES
            scratch.append(tiles.buffer)
            stages = [Stage(tiled(tiles), ("route", chosen))]
        finish = [
            Stage(outputs(tiles, piece), (HIDDEN, chosen, *words, *biases[1], PRODUCTS))
            for piece, words in zip(down, last, strict=True)
        ]
        finish.append(Stage(sums(job), (PRODUCTS, "route", "out")))
    stages += [
        Stage(hidden(tiles, piece), ("x", chosen, *words, *biases[0], HIDDEN))
        for piece, words in zip(gate_up, first, strict=True)
    ]
    return Staged((*stages, *finish), tuple(scratch))


def experts(job: Experts) -> Staged:
    """The launches of an Experts job whose stacks are stored whole."""
    return experts_in_pieces(job, placed(job.gate_up), placed(job.down))


def _words(pieces: Sequence[MatrixPiece], before: int) -> list[list[str]]:
    """The names of the arrays of each piece; `before`: how many arrays come first."""
    found = []
    for piece in pieces:
        count = len(parts(piece.matrix))
        found.append([f"w{before + i}" for i in range(count)])
        before += count
    return found
