"""An artifact for cpu has programs for several vector units; the machine takes the best one that it
can run.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

pytest.importorskip("tvm")

from nearfar import Engine
from nearfar.build.options import BuildOptions
from nearfar.build.pipeline import build
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.found import Found
from nearfar.errors import BuildError, DeviceError
from nearfar.format.machines import ASSUMED, architecture, system
from nearfar.format.processor import cpu_flags
from nearfar.kernels.buckets import Buckets
from tests.support.backends import executor
from tests.support.paths import ROOT

SAMPLE = str(ROOT / "examples/sample-model")
SMALL = Buckets((1, 16), (1,))
PROMPT = "The fox and the crow"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact built without options for units."""
    out = tmp_path_factory.mktemp("units")
    return build(BuildOptions(SAMPLE, out, ("cpu",), "q4", buckets=SMALL))[0]


def answer(path: Path, program: str | None = None) -> tuple[str, str, str]:
    """A text, the program that wrote it, and why that program was chosen."""
    with Engine.load(path, kv_memory="4MB", program=program) as engine:
        done = engine.completions.create(prompt=PROMPT, max_tokens=40, temperature=0)
        choice = engine.asynchronous.core.choice
        assert choice is not None
        assert executor(engine).program_name == choice.program
        return done.choices[0].text, choice.program, choice.why


def machine(features: Iterable[str]) -> Found:
    """This machine, pretending to have exactly these features."""
    return Found(frozenset(features), arch=architecture(), system=system())


def units(path: Path) -> list[str]:
    return [program.name.rpartition("-")[2] for program in Artifact.open(path).manifest.programs]


def test_there_is_a_program_for_each_unit_the_best_first(artifact: Path) -> None:
    carried = {"x86_64": ["avx512", "avx2"], "aarch64": ["dotprod", "neon"]}
    assert units(artifact) == carried[architecture()]


def test_the_best_that_the_machine_has_runs_and_every_one_says_the_same(artifact: Path) -> None:
    programs = Artifact.open(artifact).manifest.programs
    able = [program.name for program in programs if cpu_flags() >= {*program.requires.features}]
    text, name, why = answer(artifact)
    assert (name, why) == (able[0], "first" if len(able) > 1 else "only")
    for pinned in able:
        assert answer(artifact, pinned) == (text, pinned, "pinned")


def test_a_machine_whose_features_cannot_be_told_takes_the_baseline(artifact: Path) -> None:
    (only,) = Artifact.open(artifact).able_programs(machine(ASSUMED[architecture()]))
    assert only.name == Artifact.open(artifact).manifest.programs[-1].name


def test_a_machine_without_any_of_the_units_is_told_what_it_lacks(artifact: Path) -> None:
    with pytest.raises(DeviceError, match=r"avx512 needs .*; \S+-avx2 needs feature|neon needs feature neon"):
        Artifact.open(artifact).able_programs(machine(()))


def test_units_can_be_asked_for_by_name(tmp_path: Path) -> None:
    first, *_, last = {"x86_64": ("avx2", "avxvnni"), "aarch64": ("neon", "i8mm")}[architecture()]
    options = BuildOptions(SAMPLE, tmp_path, ("cpu",), "q4", cpu_features=(last, first), buckets=SMALL)
    assert units(build(options)[0]) == [last, first]


def test_a_unit_of_another_architecture_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"no unit of .* is called 'simd128': use native, baseline or of"):
        build(BuildOptions(SAMPLE, tmp_path, ("cpu",), "q4", cpu_features=("simd128",)))
    assert not list(tmp_path.rglob("weights"))
