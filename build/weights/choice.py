"""Chooses how each matrix is stored, by the options, the checkpoint's codes, and what a target supports."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from nearfar.build.weights.container import Checkpoint
from nearfar.build.weights.quantize import Scheme
from nearfar.build.weights.quantized.contract import Quantized, finer, held_in, joint
from nearfar.build.weights.stream import KEPT, WeightsReport
from nearfar.format.scales import PAIRS
from nearfar.kernels.quantized import Matrix, StorableMatrices
from nearfar.step.params import Param

EVERYTHING = StorableMatrices()
"""What the targets together can store."""


@dataclass(frozen=True)
class SchemeChoice:
    """How each matrix is stored. `keeps`: the checkpoint's tensors whose codes are carried over."""

    matrices: dict[str, Matrix]
    report: WeightsReport
    keeps: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Codes:
    """The scheme of a matrix, or the `reason` why it is dense. `keeps`: as in SchemeChoice."""

    scheme: Scheme | None
    reason: str | None = None
    keeps: frozenset[str] = frozenset()
    rows: tuple[tuple[int, Scheme], ...] = ()
    """The numbers of rows that are stored in each scheme, if not all are in `scheme`."""

    def matrix(self, param: Param) -> Matrix:
        """The matrix of a parameter that has a scheme."""
        assert self.scheme is not None, param.name
        rows = self.rows or ((param.n, self.scheme),)
        return Matrix.of([Matrix(n, param.k, s.bits, s.group_size, param.stack, s.scales) for n, s in rows])


def choose_matrices(
    params: Sequence[Param],
    checkpoint: Checkpoint,
    scheme: Scheme,
    quantized: Quantized | None = None,
    keeps: Collection[str] = (),
    held: StorableMatrices = EVERYTHING,
) -> SchemeChoice:
    """Choose how each matrix is stored: quantized where its width allows, else float16 (float32 for a float32
    tensor with scheme none).

    `keeps`: the matrices of `quantized` whose codes are carried over. If there are any, matrices that are
    floats in the checkpoint stay floats, and codes that a target cannot hold (`held`) are requantized, finer.
    """
    matrices, report, kept = {}, WeightsReport(), set[str]()
    report.checkpoint_format = quantized.name if quantized is not None else None
    if keeps:
        report.method = KEPT
    for param in params:
        if not param.is_matrix:
            continue
        carries = quantized is not None and bool(keeps)
        codes = _codes(param, quantized, scheme, keeps, held) if quantized and carries else _Codes(scheme)
        reason = (
            codes.reason or (None if codes.keeps else _kept_float(param)) or _why_dense(param, codes.scheme)
        )
        if reason is None and codes.scheme is not None:
            matrices[param.name] = codes.matrix(param)
            report.quantized.append(param.name)
            kept |= codes.keeps
        else:
            names = [name for name in param.tensors if name in checkpoint.entries]
            wide = scheme.bits == 0 and any(checkpoint.entries[name].dtype == np.float32 for name in names)
            matrices[param.name] = Matrix(param.n, param.k, 32 if wide else 16, stack=param.stack)
            report.dense.append({"name": param.name, "reason": reason or ""})
        if quantized and carries:
            becomes = "float16" if reason or codes.scheme is None else codes.scheme.label
            lost = [name for name in param.tensors if name in quantized.tensors and name not in kept]
            report.anew.update((quantized.kind(name), becomes) for name in lost)
    return SchemeChoice(matrices, report, frozenset(kept))


def _codes(
    param: Param, quantized: Quantized, scheme: Scheme, keeps: Collection[str], held: StorableMatrices
) -> _Codes:
    """Choose the scheme of a matrix in a checkpoint of which all, some or none of the matrix's tensors are
    quantized.

    Tensors that are computed together are stored as floats where one of them is a float, which loses less
    than codes would. Otherwise each is stored in its own scheme; or, if the target has no matrices in pieces,
    or none is lost by it (`held.widens`), all are stored in the scheme that holds all their codes.
    """
    floats = [name for name in param.tensors if name not in quantized.tensors]
    if len(floats) == len(param.tensors):
        return _Codes(None, "not quantized in the checkpoint")
    if floats:
        return _Codes(None, f"computed together with {floats[0]}, which the checkpoint has as floats")
    found: list[Scheme] = []
    kept: set[str] = set()
    anew = replace(scheme, scales=PAIRS)
    for name in param.tensors:
        has = quantized.tensors[name] if name in keeps else None
        holds = held_in(has or anew, held)
        if has is not None and holds is not None:
            kept.add(name)
        made = holds or finer(has or anew, held.groups)
        if made is None:
            there = ", ".join(map(str, held.groups))
            return _Codes(None, f"{quantized.kind(name)} has no finer codes in groups of {there}")
        found.append(made)
    apart = held.apart(each.scales for each in found) and _apart(param)
    if apart and len(set(found)) > 1 and all(each.fits(param.k) for each in found):
        rows = tuple(zip(param.tensors.values(), found, strict=True))
        return _Codes(joint(found), keeps=frozenset(kept), rows=rows)
    return _Codes(joint(found), keeps=frozenset(kept))


def _apart(param: Param) -> bool:
    """Whether a parameter has whole tensors one after the other, the rows of each in any order."""
    rows = [
        (tensor, sum(piece.rows for piece in pieces))
        for tensor, pieces in groupby(param.pieces, lambda piece: piece.tensor)
    ]
    return param.stack == 1 and rows == list(param.tensors.items())


def _kept_float(param: Param) -> str | None:
    """The reason why a matrix is quantized only if the checkpoint has its codes; None where it may be."""
    return "a router: rounded weights would choose other experts" if param.floats else None


def _why_dense(param: Param, scheme: Scheme | None) -> str | None:
    """The reason why a matrix is not quantized; None where it is."""
    if scheme is None or not scheme.bits:
        return "not asked for (--quant none)"
    if scheme.fits(param.k):
        return None
    if param.k % scheme.group_size:
        return f"width {param.k} is not a multiple of group size {scheme.group_size}"
    return f"codes of {scheme.bits} bits in rows of {param.k} do not fill whole words"
