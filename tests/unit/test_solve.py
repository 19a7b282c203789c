"""Quality good: every multiplied matrix is quantized by the mean squares of its inputs in the float model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from nearfar.build.calibration.forward import Forward, stretches
from nearfar.build.calibration.solve import FloatWeights, rows_of, solve
from nearfar.build.calibration.text import CalibrationText
from nearfar.build.options import BuildOptions
from nearfar.build.source import open_source
from nearfar.build.weights.quantize import Scheme, dequantize, quantize
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
    solved = solve(
        source, "good", CalibrationText(windows, "", ""), lambda done, total: told.append((done, total))
    )
    assert told == [(index, told[-1][1]) for index in range(len(told))]
    squares: dict[str, npt.NDArray[np.float32]] = {}
    forward, weights = Forward(source.model.step, windows), FloatWeights(source)
    for stretch in stretches(source.model.step):
        forward.watch(stretch, weights, lambda name, x: squares.setdefault(name, np.square(x).mean(0)))
        forward.advance(stretch, weights)
    watched = [param for param in source.params if param.name in squares]
    params = [param for param in watched if source.matrices[param.name].quantized]
    names = {name for param in params for name in param.tensors}
    assert set(solved) == names
    for param in params:
        scheme = Scheme(3, source.matrices[param.name].group)
        for name in param.tensors:
            expected = quantize(rows_of(source, name), scheme, name, squares[param.name])
            found, wanted = (dequantize(tensor, scheme.group_size) for tensor in (solved[name], expected))
            assert np.mean(found == wanted) > 0.99, name
