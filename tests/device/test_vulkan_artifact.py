"""The SPIR-V modules of whole artifacts are valid, and every build makes the same bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nearfar.build.pipeline import BuildOptions, build
from nearfar.format.manifest_file import parse
from nearfar.kernels.buckets import Buckets
from tests.support.backends import Lab
from tests.support.paths import ROOT
from tests.support.spirv import validate

SOFTWARE = ("software",)


@pytest.mark.parametrize("model", ["stories", "q4", "q8"])
def test_every_module_of_an_artifact_is_valid(lab: Lab, model: str) -> None:
    """Unquantized, q4 and q8, each in f32 and f16."""
    root = lab.artifact(model, "vulkan")
    files = sorted(root.glob("kernels/*.spv"))
    assert len(files) > 40
    for file in files:
        validate(file.read_bytes())


def test_the_sample_is_the_same_bytes_every_time(tmp_path: Path) -> None:
    """Two builds with one bucket; f32 needs no feature, f16 only 16-bit storage."""
    sample = str(ROOT / "examples/sample-model")
    roots = [tmp_path / name for name in ("first", "second")]
    for root in roots:
        build(BuildOptions(sample, root, ("vulkan",), "q4", device_classes=SOFTWARE, buckets=Buckets((1,))))
    first, second = (
        {path.relative_to(root): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
        for root in roots
    )
    assert first == second
    manifest = parse(json.loads(first[Path("vulkan/manifest.json")]), "the sample")
    features = {program.precision: program.requires.features for program in manifest.programs}
    assert features == {"f16": ("storageBuffer16BitAccess",), "f32": ()}
    for program in manifest.programs:
        for kernel in program.kernels.values():
            assert len(kernel.workgroup) == 3
            assert kernel.entry == "main"
            validate(first[Path("vulkan") / str(kernel.file)])
