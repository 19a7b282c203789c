"""Chooses bits and a way of storing scales for each matrix at a given total size, so that the model's answers
lose least.

The loss of storing a matrix in fewer bits is estimated as its error times its sensitivity: the error is Σ
h·(w - ŵ)², with h the mean of squares of each input; the sensitivity is what the next token's distribution
loses (the Kullback-Leibler divergence from the float model's, per position) for one such error, measured with
that matrix alone at PROBE bits and all others float. A model of embeddings loses the cosine distance of its
vectors from the float model's. All experts of a stack have the same bits; the errors of each are weighed by
the inputs of the tokens that choose it. Costs of several matrices add up, as far as they are small. Finding
the least sum at a given size is a knapsack problem: the steps of each matrix are taken in the order of what
they gain per byte, over the lower convex hull of its sizes (H. Everett, 1963).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from nearfar.build.calibration.arithmetic import Array
from nearfar.build.calibration.chosen import Chosen, Shares, whole
from nearfar.build.calibration.forward import Forward, Stretch, stretches
from nearfar.build.calibration.solve import FloatWeights, moments_of, rows_of, stacks_of
from nearfar.build.calibration.text import CalibrationText
from nearfar.build.source import Source
from nearfar.build.weights.quantize import Scheme, dequantize, quantize, to_float32
from nearfar.build.weights.ways import squared_error, stored_as, ways
from nearfar.edge_runtime.artifact.budget import show_size
from nearfar.errors import BuildError
from nearfar.format.scales import CODE_BITS
from nearfar.kernels.quantized import Matrix
from nearfar.step import ops
from nearfar.step.operation import looked_up_in, multiplied_by
from nearfar.step.params import Param

PROBE = 3
"""Bits at which a sensitivity is measured, or the next higher number that rows can have: enough that the rest
of the model still works.
"""
WINDOWS, LENGTH = 8, 256
"""Number and length in tokens of the windows that costs are measured with, taken evenly from all of
the text.
"""
ANSWERS = 4
"""The next token is computed at one position in ANSWERS: a large vocabulary takes as long as the
layers do.
"""


@dataclass(frozen=True)
class Costs:
    """Bytes and loss of one matrix in each scheme that it may have: bits, and a way of storing scales."""

    size: Mapping[Scheme, int]
    loss: Mapping[Scheme, float]


def measure(
    source: Source, text: CalibrationText, advance: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Costs]:
    """Measure the costs of every quantized matrix; `advance` gets the number of finished stretches and of
    all.
    """
    length = min(LENGTH, text.windows.shape[1])
    forward = Forward(source.model.step, text.part(WINDOWS).windows[:, :length])
    parts = stretches(source.model.step)
    expected = _answers(forward.copy(), parts, FloatWeights(source))
    loss = _divergence if source.model.embedding is None else _turned
    params = {param.name: param for param in source.params}
    costs: dict[str, Costs] = {}
    for index, stretch in enumerate(parts):
        advance(index, len(parts))
        weights = FloatWeights(source)
        chosen, stacks = Chosen(), stacks_of(stretch, source)
        run = partial(forward.watch, stretch, weights, choose=chosen.add if stacks else None)
        moved = _looked_up(stretch, source) | moments_of(run, stretch, source, whole=False)
        shares = {
            name: whole(params[name], np.asarray(moments, np.float32)) for name, moments in moved.items()
        }
        shares |= {name: partial(chosen.shares, params[name]) for name in sorted(stacks)}
        errors: dict[str, dict[Scheme, float]] = {}
        probes: dict[str, Array] = {}
        for name, of in shares.items():
            errors[name], probes[name] = _errors(source, params[name], of)
        for name, found in _with_each(probes, forward, parts, index, source):
            lost, matrix = loss(expected, found), source.matrices[name]
            probe = errors[name][_probe(errors[name])]
            costs[name] = Costs(
                {scheme: stored_as(matrix, scheme).bytes for scheme in errors[name]},
                {scheme: error * lost / max(probe, 1e-30) for scheme, error in errors[name].items()},
            )
        if index < len(parts) - 1:
            forward.advance(stretch, weights)
    advance(len(parts), len(parts))
    return costs


def _with_each(
    probes: Mapping[str, Array], forward: Forward, parts: Sequence[Stretch], index: int, source: Source
) -> Iterator[tuple[str, Array]]:
    """Yield each matrix's name and the model's answers with only that matrix of stretch `index` replaced by
    its probe; `forward` has reached that stretch.

    The stretches after it are run for all probes together, so that their weights are read once.
    """
    step = source.model.step
    after: dict[str, Forward] = {}
    for name, probe in probes.items():
        weights = FloatWeights(source, given={name: probe})
        if index and name in parts[0].params:  # the head's matrix is the embedding as well
            yield name, _answers(Forward(step, forward.windows), parts, weights)
        elif index == len(parts) - 1:
            yield name, _answers(forward.copy(), parts[index:], weights)
        else:
            after[name] = forward.copy()
            after[name].advance(parts[index], weights)
    if after:
        found = _answers(Forward.together(after.values()), parts[index + 1 :], FloatWeights(source))
        yield from zip(after, np.split(found, len(after)), strict=True)


def _looked_up(stretch: Stretch, source: Source) -> dict[str, Array]:
    """The embedding tables that are only looked up, each with importances of one: all their inputs count
    alike.
    """
    multiplied = {name for op in source.model.step.ops for name in multiplied_by(op)}
    tables = {name for op in stretch.ops for name in looked_up_in(op)} - multiplied
    found = {name: source.matrices[name] for name in sorted(tables)}
    return {name: np.ones(matrix.k) for name, matrix in found.items() if matrix.quantized}


def _answers(forward: Forward, parts: Sequence[Stretch], weights: FloatWeights) -> Array:
    """The model's outputs at the sampled positions: float32 [rows, vocab] log-probabilities of the next
    token, or embeddings [rows, width] of length 1.
    """
    for stretch in parts[:-1]:
        forward.advance(stretch, weights)
        weights.forget()
    alone = not any(isinstance(op, ops.Attend) for op in parts[-1].ops)
    last = forward.thinned(ANSWERS) if alone else forward
    blocks = []
    embeds = isinstance(parts[-1].ops[-1], ops.Embedding)
    for logits in last.finish(parts[-1], weights):
        if embeds:
            blocks.append(logits / np.maximum(np.linalg.norm(logits, axis=-1, keepdims=True), 1e-30))
            continue
        shifted = logits - logits.max(-1, keepdims=True)
        blocks.append(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))
    return np.concatenate(blocks)


def _divergence(expected: Array, found: Array) -> float:
    """Mean over positions of Σ p·(log p - log q)."""
    return float((np.exp(expected) * (expected - found)).sum(-1).mean(dtype=np.float64))


def _turned(expected: Array, found: Array) -> float:
    """Mean over positions of the cosine distance of two embeddings of length 1."""
    return float((1 - (expected * found).sum(-1, dtype=np.float64)).mean())


def _schemes(matrix: Matrix, source: Source) -> list[Scheme]:
    """The schemes that a quantized matrix may have: every number of bits in every way of storing scales."""
    fitting = [bits for bits in CODE_BITS if Scheme(bits, matrix.group).fits(matrix.k)]
    return [way for bits in fitting for way in ways(Scheme(bits, matrix.group), matrix.k, source.storable)]


def _errors(source: Source, param: Param, shares: Shares) -> tuple[dict[Scheme, float], Array]:
    """Σ h·(w - ŵ)² for each scheme, and the matrix dequantized from the probe. `shares`: the rows of a tensor
    that are quantized together.
    """
    schemes = _schemes(source.matrices[param.name], source)
    losses = dict.fromkeys(schemes, 0.0)
    bits = _probe_bits(schemes)
    tensors: dict[Scheme, dict[str, Array]] = {way: {} for way in schemes if way.bits == bits}
    for name in param.tensors:
        parts: dict[Scheme, list[Array]] = {way: [] for way in tensors}
        for share in shares(name):
            weight = to_float32(rows_of(source, name, share.first, share.last))
            for scheme in schemes:
                quantized = quantize(weight, scheme, name, share.importance)
                rounded = dequantize(quantized, scheme.group_size, scheme.scales)
                if scheme in parts:
                    parts[scheme].append(rounded)
                losses[scheme] += squared_error(weight, rounded, share.weight)
        for scheme, found in parts.items():
            tensors[scheme][name] = found[0] if len(found) == 1 else np.concatenate(found)
    return losses, FloatWeights.stacked(param, tensors[_probe(losses)])


def _probe(errors: Mapping[Scheme, float]) -> Scheme:
    """The scheme with which a sensitivity is measured: of those with the probe's bits, the one with the least
    error.
    """
    bits = _probe_bits(errors)
    return min((scheme for scheme in errors if scheme.bits == bits), key=lambda scheme: errors[scheme])


def _probe_bits(schemes: Iterable[Scheme]) -> int:
    return min(scheme.bits for scheme in schemes if scheme.bits >= PROBE)


def allocate(costs: Mapping[str, Costs], budget: int) -> dict[str, Scheme]:
    """Choose a scheme for each matrix, at most `budget` bytes in all, with the least loss that the hulls
    allow; a budget for the smallest schemes at least.
    """
    steps = {name: list(_hull(cost)) for name, cost in costs.items()}
    chosen = {name: found[0] for name, found in steps.items()}
    spent = sum(costs[name].size[scheme] for name, scheme in chosen.items())

    def step(name: str, at: int) -> tuple[float, str, int]:
        """The sort key of a matrix's next step: what it gains per byte, the largest gain first."""
        cost, (less, more) = costs[name], steps[name][at : at + 2]
        gained = cost.loss[less] - cost.loss[more]
        return -gained / (cost.size[more] - cost.size[less]), name, at

    waiting = [step(name, 0) for name, found in steps.items() if len(found) > 1]
    heapq.heapify(waiting)
    while waiting:
        _, name, at = heapq.heappop(waiting)
        less, more = steps[name][at : at + 2]
        spent += costs[name].size[more] - costs[name].size[less]
        if spent > budget:
            spent -= costs[name].size[more] - costs[name].size[less]
            continue  # other matrices may be small enough
        chosen[name] = more
        if at + 2 < len(steps[name]):
            heapq.heappush(waiting, step(name, at + 1))
    return chosen


def _hull(costs: Costs) -> Iterator[Scheme]:
    """Yield the schemes on the lower convex hull of loss over bytes, the smallest first."""
    hull: list[Scheme] = []
    for scheme in sorted(costs.size, key=lambda scheme: (costs.size[scheme], costs.loss[scheme])):
        if hull and costs.loss[scheme] >= costs.loss[hull[-1]]:
            continue
        while len(hull) > 1 and _slope(costs, hull[-2], scheme) <= _slope(costs, hull[-2], hull[-1]):
            hull.pop()
        hull.append(scheme)
    yield from hull


def _slope(costs: Costs, less: Scheme, more: Scheme) -> float:
    """Change of the loss per byte: the lower the better."""
    return (costs.loss[more] - costs.loss[less]) / (costs.size[more] - costs.size[less])


def allocated(
    source: Source,
    text: CalibrationText,
    bits: float | None,
    fit: int | None,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Source:
    """Give the source a scheme for each matrix: `bits` a weight on average, scales and biases included, or
    all weights within `fit` bytes. Raises BuildError where no choice has that size.
    """
    quantized = {name: matrix for name, matrix in source.matrices.items() if matrix.quantized}
    if fit is None:
        assert bits is not None
        budget = int(bits * sum(matrix.n * matrix.k for matrix in quantized.values()) / 8)
    else:
        budget = fit - sum(source.bytes_of(param) for param in source.params if param.name not in quantized)
    # Shapes alone decide whether the budget suffices, so a build is refused before it measures.
    least = sum(_least_bytes(matrix, source) for matrix in quantized.values())
    if least > budget:
        fewest = f"with {min(CODE_BITS)} bits in each matrix"
        if fit is None:
            mean = math.ceil(800 * least / sum(matrix.n * matrix.k for matrix in quantized.values())) / 100
            raise BuildError(
                f"--bits {bits:g} is too few: {fewest}, scales included, the mean is {mean:g}: use --bits "
                f"{mean:g} or more"
            )
        whole = math.ceil((fit - budget + least) / 10**5) / 10
        raise BuildError(
            f"--fit {show_size(fit)} is too small: {fewest} the weights have {whole:g} MB: use --fit "
            f"{whole:g}MB or more"
        )
    return with_schemes(source, allocate(measure(source, text, advance), budget))


def _least_bytes(matrix: Matrix, source: Source) -> int:
    """Bytes of a quantized matrix in the smallest scheme that it may have."""
    return min(stored_as(matrix, scheme).bytes for scheme in _schemes(matrix, source))


def with_schemes(source: Source, schemes: Mapping[str, Scheme]) -> Source:
    """The source with matrices in these schemes; its own has the most common number of bits."""
    weighed: dict[int, int] = {}
    for name, scheme in schemes.items():
        matrix = source.matrices[name]
        weighed[scheme.bits] = weighed.get(scheme.bits, 0) + matrix.n * matrix.k
    most = max(weighed, key=lambda bits: weighed[bits])
    return replace(source.stored_as(schemes), scheme=replace(source.scheme, bits=most))
