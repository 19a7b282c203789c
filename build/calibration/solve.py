"""Quantizes the matrices of a model, stretch by stretch.

`best` quantizes each stretch for the inputs that the already quantized stretches give it. `good` uses the
inputs in the float model: for the squares of inputs the result is the same (docs/quality.md), and one forward
suffices instead of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from nearfar.build.calibration.arithmetic import Array
from nearfar.build.calibration.chosen import Chosen, Shares, whole
from nearfar.build.calibration.forward import Forward, Stretch, Watch, stretches
from nearfar.build.calibration.text import CalibrationText
from nearfar.build.options import Quality
from nearfar.build.source import Source
from nearfar.build.weights.quantize import F32, Scheme, dequantize, quantize, stack, to_float32
from nearfar.build.weights.second_order import F64, Curvature, quantize_second_order
from nearfar.build.weights.solved import Solved
from nearfar.build.weights.stream import read_rows
from nearfar.build.weights.ways import squared_error, ways
from nearfar.format.scales import PAIRS
from nearfar.kernels.quantized import QuantTensor
from nearfar.step.operation import chosen_from, multiplied_by
from nearfar.step.params import Param

ROWS = 8192
"""Rows of a matrix that are read and quantized together."""


@dataclass(frozen=True)
class SolvedMatrix:
    """A matrix's tensors, quantized in one way, and what that loses: Σ h·(w − ŵ)²."""

    scheme: Scheme
    tensors: Mapping[str, QuantTensor]
    loss: float


class FloatWeights(Mapping[str, Array]):
    """The weights of a step as floats, read when first used and then kept: dequantized for tensors in
    `solved`, else as they are in the checkpoint.
    """

    def __init__(
        self, source: Source, solved: Solved | None = None, given: Mapping[str, Array] | None = None
    ) -> None:
        """`given`: weights that replace those of the checkpoint, by name."""
        self._source, self._solved = source, solved
        self._params = {param.name: param for param in source.params}
        self._given = dict(given or {})
        self._read = dict(self._given)

    def forget(self) -> None:
        """Drop the weights that were read, so that memory need not hold a whole model."""
        self._read = dict(self._given)

    def __getitem__(self, name: str) -> Array:
        if name not in self._read:
            self._read[name] = self._weight(self._params[name])
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)

    def _weight(self, param: Param) -> Array:
        return self.stacked(param, {name: self.tensor(param, name) for name in param.tensors})

    @staticmethod
    def stacked(param: Param, tensors: Mapping[str, Array]) -> Array:
        """Assemble a parameter from its tensors, [n, k] or [n]."""
        parts = [tensors[name][:rows] for name, rows in param.tensors.items()]
        stacked = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if not param.is_matrix:
            return param.folded(stacked)
        return stacked if param.order is None else stacked[param.order]

    def tensor(self, param: Param, name: str) -> F32:
        """Read a tensor of a parameter as float32."""
        if self._solved is not None and name in self._solved:
            matrix = self._source.matrices[param.name]
            return dequantize(self._solved[name], matrix.group, matrix.scales)
        return to_float32(rows_of(self._source, name))


def rows_of(source: Source, name: str, start: int = 0, stop: int | None = None) -> Array:
    """Read rows [start, stop) of a checkpoint's tensor as floats, dequantized where it is quantized."""
    quantized = source.quantized
    param = next(param for param in source.params if name in param.tensors)
    if quantized is not None and name in quantized.tensors:
        return quantized.weights(name, *slice(start, stop).indices(param.tensors[name])[:2])
    return read_rows(source.checkpoint, param.piece(name), param, start, stop)


def solve(
    source: Source,
    quality: Quality,
    text: CalibrationText,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Source, Solved]:
    """Quantize every matrix that is multiplied with, by the quality's method; tables that are only looked up
    are left to the caller. `advance` gets the number of finished stretches and of all.

    Gives the source with the way of storing scales that loses least of each matrix (Source.storable), and the
    quantized tensors.
    """
    solved = Solved()
    forward = Forward(source.model.step, text.windows)
    parts = stretches(source.model.step)
    second_order = quality == "best"
    for index, stretch in enumerate(parts):
        advance(index, len(parts))
        chosen, stacks = Chosen(), stacks_of(stretch, source)
        choose = chosen.add if stacks else None
        run = partial(
            forward.watch if second_order else forward.advance, stretch, FloatWeights(source), choose=choose
        )
        moments = moments_of(run, stretch, source, second_order)
        for param in (param for param in source.params if param.name in moments):
            source = _store(solved, source, param, moments[param.name])
        for param in (param for param in source.params if param.name in stacks):
            source = store_experts(solved, source, param, chosen)
        if second_order and index < len(parts) - 1:
            forward.advance(stretch, FloatWeights(source, solved))
    advance(len(parts), len(parts))
    return source, solved


def stacks_of(stretch: Stretch, source: Source) -> set[str]:
    """The quantized matrices of experts in a stretch."""
    return {name for op in stretch.ops for name in chosen_from(op) if source.matrices[name].quantized}


def moments_of(run: Callable[[Watch], None], stretch: Stretch, source: Source, whole: bool) -> dict[str, F64]:
    """Second moments of the inputs of a stretch's quantized matrices: E[x·xᵀ] [k, k], or the means of squares
    alone [k]. `run` runs the stretch.
    """
    wanted = [name for op in stretch.ops for name in multiplied_by(op) if source.matrices[name].quantized]
    sums: dict[str, F64] = {}
    counts: dict[str, int] = {}

    def watch(name: str, x: Array) -> None:
        if name not in wanted:
            return
        found = (x.T @ x if whole else np.einsum("mk,mk->k", x, x)).astype(np.float64)
        sums[name] = sums[name] + found if name in sums else found
        counts[name] = counts.get(name, 0) + len(x)

    run(watch)
    return {name: total / counts[name] for name, total in sums.items()}


def least_way(source: Source, param: Param, shares: Shares) -> Scheme:
    """The way of storing a matrix's scales with which its tensors lose least: Σ h·(w − ŵ)²."""
    schemes = _ways(source, param)
    if len(schemes) == 1:
        return schemes[0]
    return min(schemes, key=lambda scheme: sum(loss for _, _, loss in _pieces(source, param, scheme, shares)))


def _least_loss(source: Source, param: Param, shares: Shares) -> SolvedMatrix:
    """Quantize a matrix in the way of `least_way`."""
    best: SolvedMatrix | None = None
    for scheme in _ways(source, param):
        tensors: dict[str, list[QuantTensor]] = {name: [] for name in param.tensors}
        total = 0.0
        for name, piece, loss in _pieces(source, param, scheme, shares):
            tensors[name].append(piece)
            total += loss
        if best is None or total < best.loss:
            best = SolvedMatrix(scheme, {name: stack(pieces) for name, pieces in tensors.items()}, total)
    assert best is not None, param.name
    return best


def _ways(source: Source, param: Param) -> list[Scheme]:
    """The schemes to choose from. A matrix that has another way than float16 pairs keeps it: its way was
    chosen together with its bits, and others may take more bytes.
    """
    matrix = source.matrices[param.name]
    scheme = Scheme(matrix.bits, matrix.group, matrix.scales)
    return ways(scheme, param.k, source.storable) if scheme.scales == PAIRS else [scheme]


def _pieces(
    source: Source, param: Param, scheme: Scheme, shares: Shares
) -> Iterator[tuple[str, QuantTensor, float]]:
    """The tensors of a matrix quantized in one way, ROWS rows or one share at a time, and what each loses."""
    for name in param.tensors:
        for share in shares(name):
            for start in range(share.first, share.last, ROWS):
                weight = to_float32(rows_of(source, name, start, min(share.last, start + ROWS)))
                piece = quantize(weight, scheme, name, share.importance)
                rounded = dequantize(piece, scheme.group_size, scheme.scales)
                yield name, piece, squared_error(weight, rounded, share.weight)


def _store(solved: Solved, source: Source, param: Param, moments: F64) -> Source:
    """Quantize a matrix's tensors with the moments of its inputs in the way that loses least, and keep them
    in `solved`. Gives the source with that way.
    """
    curvature = Curvature.of(moments) if moments.ndim == 2 else None
    importance = np.asarray(moments if curvature is None else np.diagonal(moments), np.float32)
    stored = _least_loss(source, param, whole(param, importance))
    for name, rows in param.tensors.items():
        if name in solved:
            continue
        tensor = stored.tensors[name]
        if curvature is not None:
            weights = (rows_of(source, name, at, min(rows, at + ROWS)) for at in range(0, rows, ROWS))
            tensor = stack([quantize_second_order(each, stored.scheme, name, curvature) for each in weights])
        solved.put(name, tensor)
    return source.stored_as({param.name: stored.scheme})


def store_experts(solved: Solved, source: Source, param: Param, chosen: Chosen) -> Source:
    """Quantize the matrices of a stack, each by the squares of what the tokens that chose it give it, with
    equal weights where these are few; with all qualities, since the moments of pairs would take gigabytes.

    Gives the source with the way of storing scales that loses least.
    """
    for expert in range(param.stack):
        solved.experts += 1
        solved.seldom += chosen.importance(param.name, expert) is None
    stored = _least_loss(source, param, partial(chosen.shares, param))
    for name, tensor in stored.tensors.items():
        if name not in solved:
            solved.put(name, tensor)
    return source.stored_as({param.name: stored.scheme})
