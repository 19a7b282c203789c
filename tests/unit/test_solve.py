"""Quality good: every multiplied matrix is quantized by the mean squares of its inputs in the float model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from nearfar.build.calibration.chosen import LEAST, Chosen, whole
from nearfar.build.calibration.forward import Forward, stretches
from nearfar.build.calibration.quality import refined, with_storable
from nearfar.build.calibration.solve import FloatWeights, least_way, rows_of, solve, store_experts
from nearfar.build.calibration.text import CalibrationText
from nearfar.build.options import BuildOptions, Quality
from nearfar.build.source import Source, open_source
from nearfar.build.targets import target_of
from nearfar.build.weights.quantize import Scheme, dequantize, quantize
from nearfar.build.weights.solved import Solved
from nearfar.build.weights.ways import squared_error
from nearfar.format.scales import PAIRS, SYMMETRIC
from nearfar.step.params import Param
from tests.support.architectures import CASES, checkpoint
from tests.support.cases import Case
from tests.support.turns import share


@pytest.mark.parametrize("case", share(CASES, 4, lambda case: case.model_type), ids=str)
def test_good_weighs_inputs_by_their_squares(case: Case, tmp_path: Path) -> None:
    options = BuildOptions(
        str(checkpoint(case)), tmp_path, ("cpu",), quant="q3", quality="good", group_size=16
    )
    source = open_source(options)
    windows = np.random.default_rng(0).integers(0, source.model.vocab_size, (2, 16))
    told: list[tuple[int, int]] = []
    _, solved = solve(
        source, "good", CalibrationText(windows, "", ""), lambda done, total: told.append((done, total))
    )
    assert told == [(index, told[-1][1]) for index in range(len(told))]
    squares: dict[str, npt.NDArray[np.float32]] = {}
    inputs: dict[tuple[str, int], list[npt.NDArray[np.float32]]] = {}
    forward, weights = Forward(source.model.step, windows), FloatWeights(source)
    for stretch in stretches(source.model.step):
        forward.watch(
            stretch,
            weights,
            lambda name, x: squares.setdefault(name, np.square(x).mean(0)),
            lambda name, expert, x: inputs.setdefault((name, expert), []).append(x),
        )
        forward.advance(stretch, weights)
    watched = [param for param in source.params if param.name in squares]
    params = [param for param in watched if source.matrices[param.name].quantized]
    names = {name for param in params for name in param.tensors}
    stacks = [param for param in source.params if param.stack > 1 and source.matrices[param.name].quantized]
    assert set(solved) == names | {name for param in stacks for name in param.tensors}
    for param in stacks[-2:]:
        check_experts(source, solved, param, inputs)
    for param in params:
        scheme = Scheme(3, source.matrices[param.name].group)
        for name in param.tensors:
            expected = quantize(rows_of(source, name), scheme, name, squares[param.name])
            found, wanted = (dequantize(tensor, scheme.group_size) for tensor in (solved[name], expected))
            assert np.mean(found == wanted) > 0.99, name


def check_experts(
    source: Source,
    solved: Solved,
    param: Param,
    inputs: dict[tuple[str, int], list[npt.NDArray[np.float32]]],
) -> list[bool]:
    """Each expert is quantized by what the tokens that chose it give it, or, if these are few, with equal
    weights. Gives for each expert whether they are few.
    """
    scheme, few = Scheme(3, source.matrices[param.name].group), []
    experts = (held[param.name].reshape(param.stack, -1, param.k) for held in
               (FloatWeights(source), FloatWeights(source, solved)))  # fmt: skip
    for expert, (weight, found) in enumerate(zip(*experts, strict=True)):
        seen = np.concatenate(inputs.get((param.name, expert), [np.zeros((0, param.k), np.float32)]))
        few.append(len(seen) < LEAST)
        importance = None if few[-1] else np.square(seen).mean(0)
        wanted = dequantize(quantize(weight, scheme, param.name, importance), scheme.group_size)
        assert np.mean(found == wanted) > 0.99, (param.name, expert)
    return few


@pytest.mark.parametrize("quality", ["good", "best"])
def test_experts_that_few_tokens_choose_are_told(quality: Quality, tmp_path: Path) -> None:
    """The inputs are those of the float model, which `best` does not have behind its first matrices."""
    case = next(case for case in CASES if str(case) == "olmoe-normalized")
    options = BuildOptions(
        str(checkpoint(case)), tmp_path, ("cpu",), quant="q3", quality=quality, group_size=16
    )
    source = open_source(options)
    windows = np.random.default_rng(0).integers(0, source.model.vocab_size, (4, 20))
    text = CalibrationText(windows, "a text", "")
    _, solved = refined(options, source, lambda: text, lambda stage, done, total: None)
    assert solved is not None
    assert 0 < solved.seldom < solved.experts == 2 * 12 * 3
    told = f"{solved.seldom} of {solved.experts} matrices of experts with equal weights"
    assert source.report.method is not None
    assert told in source.report.method
    assert "fewer than 32 tokens" in source.report.method
    if quality == "best":
        return
    inputs: dict[tuple[str, int], list[npt.NDArray[np.float32]]] = {}
    forward, weights = Forward(source.model.step, windows), FloatWeights(source)
    for stretch in stretches(source.model.step):
        forward.advance(
            stretch, weights, choose=lambda name, expert, x: inputs.setdefault((name, expert), []).append(x)
        )
    stacks = [param for param in source.params if param.stack > 1]
    few = [check_experts(source, solved, param, inputs) for param in stacks]
    assert sum(map(sum, few)) == solved.seldom


def test_the_way_of_experts_is_chosen_by_what_they_see(tmp_path: Path) -> None:
    """Experts that see eight inputs alone store these best in another way than all inputs."""
    case = next(case for case in CASES if str(case) == "olmoe-normalized")
    options = BuildOptions(
        str(checkpoint(case)), tmp_path, ("cpu",), quant="q4", quality="good", group_size=64
    )
    source = with_storable(options, open_source(options), {"cpu": target_of("cpu").held})
    param = next(param for param in source.params if param.stack > 1)
    chosen, seen = Chosen(), np.zeros((LEAST, param.k), np.float32)
    seen[:, :8] = 1
    for expert in range(param.stack):
        chosen.add(param.name, expert, seen)
    solved, weight = Solved(), FloatWeights(source)[param.name]
    assert least_way(source, param, whole(param, None)).scales == SYMMETRIC
    stored = store_experts(solved, source, param, chosen).matrices[param.name]
    assert stored.scales == PAIRS
    found = FloatWeights(source.stored_as({param.name: Scheme(4, 64)}), solved)[param.name]
    other = dequantize(quantize(weight, Scheme(4, 32, SYMMETRIC), "w", seen[0]), 32, SYMMETRIC)
    assert squared_error(weight, found, seen[0]) < squared_error(weight, other, seen[0])
