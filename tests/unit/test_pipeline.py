"""What a build promises of what it wrote."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from nearfar.build import pipeline
from nearfar.build.pipeline import BuildOptions, build
from nearfar.build.source import Source
from nearfar.errors import BuildError
from nearfar.format.manifest import Rope, Weights
from nearfar.targets.mlx.target import MlxTarget
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
