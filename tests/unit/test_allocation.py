"""Bits by their cost: compared with the best choice at a size, which is found by trying all choices."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nearfar.build.calibration import allocation
from nearfar.build.calibration.allocation import ANSWERS, PROBE, WINDOWS, Costs, allocate, measure
from nearfar.build.calibration.chosen import Chosen, shares
from nearfar.build.calibration.forward import Forward, stretches
from nearfar.build.calibration.quality import refined, with_storable
from nearfar.build.calibration.solve import FloatWeights, rows_of
from nearfar.build.calibration.text import CalibrationText
from nearfar.build.options import BuildOptions
from nearfar.build.source import Source, open_source
from nearfar.build.targets import target_of
from nearfar.build.weights.quantize import F32, Scheme, dequantize, quantize
from nearfar.edge_runtime.artifact.budget import parse_size
from nearfar.errors import BuildError
from nearfar.format.scales import Scales
from nearfar.kernels.quantized import Array
from tests.support.architectures import CASES, checkpoint
from tests.support.cases import VOCAB, Case
from tests.support.cases import case as case_of

BITS = (2, 3, 4, 5, 6, 8)
ROWS_OF_320 = {"hidden_size": 320, "intermediate_size": 320, "num_attention_heads": 4, "head_dim": 80}
MEASURED = {"llama-plain", "llama-tied", "gemma2-plain", "gemma4_text-shared", "olmoe-normalized"}


def costs(count: int, seed: int) -> dict[str, Costs]:
    """Matrices of one size whose losses fall about fourfold a bit, as those of real ones do."""
    rng = np.random.default_rng(seed)
    return {
        f"m{i}": Costs(
            {Scheme(bits): 8_000 * bits + 4_000 for bits in BITS},
            {Scheme(bits): float(sensitivity * 4.0**-bits) for bits in BITS},
        )
        for i, sensitivity in enumerate(rng.lognormal(0, 2, count))
    }


def of(found: dict[str, Costs], schemes: dict[str, Scheme]) -> tuple[int, float]:
    """Bytes and loss of a choice."""
    return (
        sum(found[name].size[scheme] for name, scheme in schemes.items()),
        sum(found[name].loss[scheme] for name, scheme in schemes.items()),
    )


@pytest.mark.parametrize("seed", range(5))
def test_nothing_that_is_a_step_smaller_is_better(seed: int) -> None:
    found = costs(5, seed)
    schemes = itertools.product(map(Scheme, BITS), repeat=5)
    choices = [dict(zip(found, choice, strict=True)) for choice in schemes]
    every = [of(found, choice) for choice in choices]
    for budget in range(116_000, 345_000, 12_000):
        size, loss = of(found, allocate(found, budget))
        assert size <= budget
        # The largest step, from 6 bits to 8, may be the one that does not fit.
        best = min(other for taken, other in every if taken <= budget - 16_000)
        assert loss <= best * (1 + 1e-9)


def test_a_size_for_everything_gives_the_most_bits() -> None:
    assert set(allocate(costs(5, 0), 10**9).values()) == {Scheme(8)}


def test_a_size_is_refused_before_anything_is_measured_with_the_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class MeasuredError(Exception):
        """It measured."""

    def measured(*_: object) -> None:
        raise MeasuredError

    monkeypatch.setattr(allocation, "measure", measured)
    options = BuildOptions(str(checkpoint(CASES[0])), tmp_path, ("cpu",), quality="good", group_size=32)
    source, text = open_source(options), CalibrationText(np.zeros((1, 16), np.int64), "", "")
    for bits, fit in ((1.5, None), (None, 20_000), (None, 1000)):
        with pytest.raises(
            BuildError, match=r"^--(bits 1\.5|fit \d+.*) is too .* use --\w+ .* more$"
        ) as error:
            allocation.allocated(source, text, bits, fit)
        option, least = str(error.value).split("use --")[1].split()[:2]
        enough = (float(least), None) if option == "bits" else (None, parse_size(least))
        with pytest.raises(MeasuredError):
            allocation.allocated(source, text, *enough)


def test_bits_that_make_nothing_better_are_not_taken() -> None:
    """A matrix by chance loses more with 3 bits than with 2."""
    two, three, four = map(Scheme, (2, 3, 4))
    odd = Costs({two: 20_000, three: 28_000, four: 36_000}, {two: 0.5, three: 0.6, four: 0.1})
    assert allocate({"m": odd}, 30_000) == {"m": two}
    assert allocate({"m": odd}, 36_000) == {"m": four}


def test_a_way_that_takes_more_bytes_and_loses_more_is_not_taken() -> None:
    """Two levels are smaller than float16 pairs. Pairs are taken where they lose enough less."""
    levels = Scheme(4, 32, Scales(6, True, 320))
    pairs = Scheme(4)
    worse = Costs({pairs: 36_000, levels: 35_000}, {pairs: 0.2, levels: 0.1})
    assert allocate({"m": worse}, 36_000) == {"m": levels}
    better = Costs({pairs: 36_000, levels: 35_000}, {pairs: 0.1, levels: 0.2})
    assert allocate({"m": better}, 35_999) == {"m": levels}
    assert allocate({"m": better}, 36_000) == {"m": pairs}


def test_a_size_counts_scales_as_they_are_stored(tmp_path: Path) -> None:
    """Two levels in rows of 320 inputs take fewer bytes than float16 pairs. The size of a build with 8 bits
    suffices for 8 bits in every matrix, and that of a build with 2 bits is not refused.
    """

    def made(**size: Any) -> Source:
        options = BuildOptions(str(model), tmp_path, ("cpu",), quality="good", group_size=64, **size)
        source = with_storable(options, open_source(options), {"cpu": target_of("cpu").held})
        text = CalibrationText(np.random.default_rng(0).integers(0, VOCAB, (2, 16)), "", "")
        return refined(options, source, lambda: text, lambda stage, done, total: None)[0]

    def size(source: Source) -> int:
        return sum(map(source.bytes_of, source.params))

    model = checkpoint(case_of("llama", "rows-of-320", num_hidden_layers=1, **ROWS_OF_320))
    for bits in (2, 8):
        every = made(quant=f"q{bits}")
        fitted = made(fit=size(every))
        quantized = [matrix for matrix in fitted.matrices.values() if matrix.quantized]
        assert any(matrix.scales.superblock == 320 for matrix in quantized)
        assert {matrix.bits for matrix in quantized} == {bits}
        assert size(fitted) <= size(every)


def test_rows_that_cannot_have_every_number_of_bits_are_measured(tmp_path: Path) -> None:
    """Codes of 3, 5 and 6 bits need rows of whole runs of 32."""
    options = BuildOptions(str(checkpoint(CASES[0])), tmp_path, ("cpu",), quality="good", group_size=16)
    source = open_source(options)
    assert {matrix.k % 32 for matrix in source.matrices.values() if matrix.quantized} == {0, 16}
    text = np.random.default_rng(0).integers(0, source.model.vocab_size, (2, 16))
    for name, cost in measure(source, CalibrationText(text, "", "")).items():
        whole = source.matrices[name].k % 32 == 0
        assert tuple(scheme.bits for scheme in cost.size) == (BITS if whole else (2, 4, 8))
        losses = [cost.loss[Scheme(bits, 16)] for bits in (2, 4, 8)]
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] > 0


@pytest.mark.parametrize(
    ("case", "embeds"),
    [*((case, False) for case in CASES if str(case) in MEASURED), (CASES[0], True)],
    ids=str,
)
def test_a_loss_is_that_of_one_matrix_alone_in_a_whole_model(
    case: Case, embeds: bool, tmp_path: Path
) -> None:
    """All matrices of a stretch go through the rest of the model together, only some positions are computed,
    and the windows are taken evenly from all of the text. The loss of an embedding model is the cosine
    distance of its vectors.
    """
    options = BuildOptions(
        str(checkpoint(case)), tmp_path, ("cpu",), quality="good", bits=4.5, group_size=32, embeddings=embeds
    )
    source = open_source(options)
    text = np.random.default_rng(0).integers(0, source.model.vocab_size, (2 * WINDOWS - 1, 16))
    windows = text[::2]
    squares: dict[str, npt.NDArray[np.float32]] = {}
    chosen = Chosen()

    def answers(weights: FloatWeights) -> npt.NDArray[np.float64]:
        """Probabilities at the computed positions, or vectors: [windows, positions, vocab or width]."""
        forward = Forward(source.model.step, windows)
        for stretch in stretches(source.model.step)[:-1]:
            forward.watch(stretch, weights, watch)
            forward.advance(stretch, weights, choose=chosen.add)
        end = stretches(source.model.step)[-1]
        forward.watch(end, weights, watch)
        logits = np.concatenate(list(forward.finish(end, weights))).astype(np.float64)
        odds = np.exp(logits - logits.max(-1, keepdims=True))
        kept = odds / odds.sum(-1, keepdims=True)
        kept = logits / np.linalg.norm(logits, axis=-1, keepdims=True) if embeds else kept
        return kept.reshape(*windows.shape, -1)[:, ANSWERS - 1 :: ANSWERS]

    def watch(name: str, x: npt.NDArray[np.float32]) -> None:
        squares.setdefault(name, np.square(x).mean(0))

    expected = answers(FloatWeights(source))
    importances = {key: chosen.importance(*key) for key in chosen.sums}
    costs = measure(source, CalibrationText(text, "", ""))
    assert set(costs) == {name for name, matrix in source.matrices.items() if matrix.quantized}
    for param in (param for param in source.params if param.name in costs):
        group = source.matrices[param.name].group
        importance = squares.get(param.name, np.ones(param.k, np.float32))

        def round_rows(weight: Array, importance: F32 | None, group: int = group) -> F32:
            return dequantize(quantize(weight, Scheme(PROBE, group), "", importance), group)

        rounded = {
            name: np.concatenate([
                round_rows(rows_of(source, name, first, last), importances.get((param.name, expert)))
                for expert, first, last in shares(param, name)
            ])
            if param.stack > 1
            else round_rows(rows_of(source, name), importance)
            for name in param.tensors
        }  # fmt: skip
        found = answers(FloatWeights(source, given={param.name: FloatWeights.stacked(param, rounded)}))
        if embeds:
            lost = float((1 - (expected * found).sum(-1)).mean())
        else:
            lost = float((expected * np.log(expected / found)).sum(-1).mean())
        assert costs[param.name].loss[Scheme(PROBE, group)] == pytest.approx(lost, rel=0.02), param.name


def test_the_bits_of_experts_are_chosen_too(tmp_path: Path) -> None:
    """The size is that of all matrices, most of which are experts'."""
    case = next(case for case in CASES if str(case) == "olmoe-normalized")
    options = BuildOptions(str(checkpoint(case)), tmp_path, ("cpu",), quality="good", bits=3.5, group_size=32)
    source = open_source(options)
    text = CalibrationText(np.random.default_rng(0).integers(0, source.model.vocab_size, (4, 16)), "", "")
    made = allocation.allocated(source, text, 3.5, None)
    stacks = [matrix for matrix in made.matrices.values() if matrix.stack > 1]
    assert min(matrix.bits for matrix in stacks) < 4
    found = [matrix for matrix in made.matrices.values() if matrix.quantized]
    spent = 8 * sum(matrix.bytes for matrix in found) / sum(matrix.n * matrix.k for matrix in found)
    assert 3 < spent <= 3.5
