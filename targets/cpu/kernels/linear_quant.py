"""Matmul over affine weights of 2 to 8 bits: out = epilogue(x' · Wᵀ), one launch.

Activations are quantised to 16 bits per group, in the same launch, and multiplied as pairs (vpmaddwd, or
vpdpwssd with VNNI). Why not 8 bits, as is usual: the greedy text has to be that of float32 on the dequantized
weights, and 8 bits move logits by percents. What 16 bits cost: little. At one row memory is the limit (Zen 3,
one thread, 576 inputs: 33 G weights/s are 19 GB/s); for many rows two vpmaddwd take the place of a
vpmaddubsw, a vpmaddwd with ones, and the handling of signs. On two threads of an idle Zen 3, SmolLM2-135M's
shape, prefill is 2.1 times and decode 2.6 times as fast as llama.cpp's Q4_0 (docs/benchmarks.md).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tvm.script.ir_builder import tirx as T

from nearfar.targets.cpu import packing
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.epilogue import finish_tile, out_args, params
from nearfar.targets.cpu.kernels.rows import quantise_row, x_args
from nearfar.targets.cpu.units import Unit
from nearfar.targets.jobs import Linear
from nearfar.targets.kernels import Stage, Staged
from nearfar.targets.quantized import Matrix

Expr = Any


def row_tile(m: int) -> int:
    """Rows of x that share a pass over a block of weights: sums of 8 by 8 outputs fill half the registers.

    (4 by 16 unpacks every weight twice as often per row, and LLVM's scheduler spills five sums in its loop.)
    """
    return next(tile for tile in (4, 2, 1) if m % tile == 0)


def linear(job: Linear, unit: Unit) -> Staged:
    """Quantise the rows of x (in the same launch), then a parallel loop over blocks of 16 outputs."""
    matrix = job.matrix
    w_args = [(f"w{i}", part.shape, part.dtype) for i, part in enumerate(packing.parts(matrix))]
    tile = row_tile(job.m)
    # Rows of a tile are interleaved: one stream, whatever k is (rows 16 KiB apart would share a set of the L1
    # cache).
    scratch: tuple[tuple[tuple[int, ...], str], ...] = (
        ((job.m // tile, matrix.k // 2 * tile), "int32"),
        ((job.m // tile, matrix.k // matrix.group, 2, tile), "float32"),
    )
    s_args = [(f"scratch:{i}", shape, dtype) for i, (shape, dtype) in enumerate(scratch)]
    args = [*x_args(job), *w_args, *out_args(job)]
    args[-1:-1] = s_args  # the output stays last

    def body(*buffers: Expr) -> None:
        _body(job, unit, dict(zip([name for name, *_ in args], buffers, strict=True)))

    func = v.prim_func(
        "linear", [(name.replace(":", "_"), shape, dtype) for name, shape, dtype in args], body
    )
    return Staged((Stage(func, params(args)),), scratch)


def _body(job: Linear, unit: Unit, buf: dict[str, Expr]) -> None:
    tile = row_tile(job.m)
    with v.rows(job.m) as m:
        quantise_row(job, buf, m, tile, buf["scratch:0"], buf["scratch:1"])
    with T.parallel(0, packing.blocks(job.columns)) as block, T.serial(0, job.m // tile) as t:
        acc = v.registers(tile)
        accumulate(job, unit, buf, block, t, acc)
        up = None
        if job.gate is not None:
            up = v.registers(tile)
            accumulate(job, unit, buf, block + packing.blocks(job.columns), t, up)
        finish_tile(job, buf, block, t * tile, tile, acc, up)


def accumulate(job: Linear, unit: Unit, buf: dict[str, Expr], block: Expr, t: Expr, acc: Expr) -> None:
    """acc[row] = x'[rows of tile t] · W[block]ᵀ.

    Per group: an exact integer sum of 16-bit products, then scale·(Σ q x) + bias·(Σ x) in float32.
    """
    matrix, tile = job.matrix, row_tile(job.m)
    step, parts = packing.step(matrix), packing.parts(matrix)
    planes = [T.decl_buffer(part.shape, "int32", data=buf[f"w{i}"].data) for i, part in enumerate(parts[:-1])]
    pairs, sums_x, affine = buf["scratch:0"], buf["scratch:1"], buf[f"w{len(parts) - 1}"]
    by_16 = tile == 1 and matrix.bits == 4  # see _pairs_by_16
    for r in range(tile):
        v.put1(acc, [r], v.splat(0.0))
    with T.serial(0, matrix.k // matrix.group) as g:
        sums = v.registers(tile * (2 if by_16 else 1), v.I32X16)
        for r in range(tile * (2 if by_16 else 1)):
            v.put1(sums, [r], v.isplat(0))
        with T.serial(0, matrix.group // step) as c:
            words = _words(matrix, planes, block, g, c)
            first = T.Bind(g * (matrix.group // 2) + c * (step // 2))
            unpacked = _pairs_by_16(words[0][0]) if by_16 else _pairs(matrix, words)
            for j in range(step // 2):
                for r in range(tile):
                    pair = T.Bind(v.splat(pairs[t, (first + j) * tile + r]))
                    i = r + (tile if by_16 and j % 2 else 0)
                    v.put1(sums, [i], v.madd16(unit, sums[i], unpacked[j], pair))
        if by_16:
            v.put1(sums, [0], sums[0] + (sums[1] >> v.isplat(4)))
        scale = T.Bind(v.cast(v.lanes(affine, [block, g, 0, 0]), v.F32X16))
        bias = T.Bind(v.cast(v.lanes(affine, [block, g, 1, 0]), v.F32X16))
        for r in range(tile):
            scaled = T.Bind(scale * v.splat(sums_x[t, g, 0, r]))
            v.put1(acc, [r], acc[r] + v.cast(sums[r], v.F32X16) * scaled)
            v.put1(acc, [r], acc[r] + bias * v.splat(sums_x[t, g, 1, r]))


def _words(matrix: Matrix, planes: Sequence[Expr], block: Expr, g: Expr, c: Expr) -> list[list[Expr]]:
    """The words of each plane that hold turn c of group g: `packing.step` inputs of 16 rows."""
    words = []
    for plane, buffer in zip(packing.PLANES[matrix.bits], planes, strict=True):
        first, down = packing.first_word(matrix, plane, g, c)
        count = max(1, packing.step(matrix) // plane.per_word)
        loaded = [v.lanes(buffer, [block, first + i, 0]) for i in range(count)]
        words.append(loaded if isinstance(down, int) else [T.Bind(word >> v.splat(down)) for word in loaded])
    return words


def _pairs(matrix: Matrix, words: Sequence[Sequence[Expr]]) -> list[Expr]:
    """The pairs of int16 codes in vectors of words."""
    planes = packing.PLANES[matrix.bits]
    return [
        functools.reduce(
            lambda a, b: T.Bind(a | b), [_pair(plane, of, j) for plane, of in zip(planes, words, strict=True)]
        )
        for j in range(packing.step(matrix) // 2)
    ]


def _pair(plane: packing.Plane, words: Sequence[Expr], j: int) -> Expr:
    """What a plane has of pair j, at its place in the code."""
    word, at = divmod(j, plane.per_word // 2)
    down = at * plane.bits - plane.low
    shifted = (
        words[word] >> v.isplat(down) if down > 0 else words[word] << v.isplat(-down) if down else words[word]
    )
    return T.Bind(shifted & v.isplat((plane.mask << plane.low) * 0x10001))


def _pairs_by_16(word: Expr) -> list[Expr]:
    """The same for 4 bits, odd pairs 16 times too large: one shift a word instead of three.

    Their sums are shifted back, exactly.
    """
    shifted = T.Bind(word >> v.isplat(8))
    low, high = v.isplat(0x000F000F), v.isplat(0x00F000F0)
    return [T.Bind(word & low), T.Bind(word & high), T.Bind(shifted & low), T.Bind(shifted & high)]
