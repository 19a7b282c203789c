"""What a build promises of what it wrote."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from nearfar.build import pipeline
from nearfar.build.pipeline import BuildOptions, build
from nearfar.build.source import Source, open_source
from nearfar.errors import BuildError
from nearfar.format.manifest import Rope, Weights
from nearfar.targets import target_of
from nearfar.targets.mlx.target import MlxTarget
from nearfar.targets.quantized import Matrix
from nearfar.targets.target import Made

SAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sample-model"


class Careless(MlxTarget):
    """A target that forgets the frequencies of the rotary embedding."""

    def finish(self, source: Source, root: Path, weights: Weights, options: BuildOptions) -> Made:
        made = super().finish(source, root, weights, options)
        return dataclasses.replace(made, ropes={"rope": Rope((), 1.0)})


def test_what_its_own_reader_refuses_never_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "target_of", {"mlx": Careless()}.__getitem__)
    with pytest.raises(
        BuildError,
        match=r"its own reader refuses, please report it: .*inv_freq should be as many numbers as one of",
    ):
        build(BuildOptions(str(SAMPLE), tmp_path / "out", targets=("mlx",)))
    assert list((tmp_path / "out").iterdir()) == []


def test_a_matrix_that_no_offset_reaches_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    options = BuildOptions(str(SAMPLE), tmp_path / "out")
    source = open_source(options)
    dense, packed = Matrix(262_144, 8960, 16), Matrix(262_144, 8960, 4, 64)  # Gemma 4 E2B's largest
    with pytest.raises(BuildError, match=r"per_layer \[262144, 8960\] .*--quant q4"):
        target_of("cpu").check(dataclasses.replace(source, matrices={"per_layer": dense}), options)
    target_of("cpu").check(dataclasses.replace(source, matrices={"per_layer": packed}), options)
