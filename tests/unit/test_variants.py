"""Programs for classes of GPUs: the files of a build, and what programs share."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from nearfar.build.pipeline import BuildOptions, build
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.artifact.variants import line_up
from nearfar.edge_runtime.found import Found
from nearfar.errors import ArtifactError, BuildError, DeviceError
from nearfar.format.adapters import DEVICE_CLASSES
from nearfar.format.manifest_file import parse
from nearfar.kernels.buckets import Buckets
from tests.support import tiny
from tests.support.paths import ROOT
from tests.support.turns import share

SAMPLE = str(ROOT / "examples/sample-model")
ONE = Buckets((1,), (1,))


@pytest.fixture(scope="module", params=["webgpu", "vulkan"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The sample for two classes, with one bucket."""
    out = tmp_path_factory.mktemp("variants")
    options = BuildOptions(
        SAMPLE, out, (request.param,), "q4", buckets=ONE, device_classes=("discrete", "software"),
    )  # fmt: skip
    return Artifact.open(build(options)[0])


def test_a_program_is_named_by_its_class_and_precision(built: Artifact) -> None:
    """At one row, a program with cooperative matrices would be the plain program under another name."""
    programs = built.manifest.programs
    assert [(p.name, p.device_class, p.precision) for p in programs] == [
        ("software-f16", "software", "f16"), ("software-f32", "software", "f32"),
        ("discrete-f16", "discrete", "f16"), ("discrete-f32", "discrete", "f32"),
    ]  # fmt: skip


def test_programs_with_the_same_kernel_share_its_file(built: Artifact) -> None:
    """A file is named by its content, so there are no duplicates, and no files that no program names."""
    named = [kernel for program in built.manifest.programs for kernel in program.kernels.values()]
    files = {str(kernel.file) for kernel in named}
    there = {str(path.relative_to(built.path)) for path in (built.path / "kernels").rglob("*.*")}
    assert there == files
    assert len(files) < len(named)
    for kernel in named:
        assert f".{str(kernel.sha256)[:8]}." in str(kernel.file)
    samplers = [
        {name: kernel.file for name, kernel in program.kernels.items() if name.startswith("greedy")}
        for program in built.manifest.programs
    ]
    assert samplers[0]
    assert all(each == samplers[0] for each in samplers)


@pytest.mark.parametrize(
    ("target", "feature"),
    share([("webgpu", "packed_4x8_integer_dot_product"), ("vulkan", "shaderIntegerDotProduct")], 2),
)
def test_products_of_bytes_are_programs_of_their_own(target: str, feature: str, tmp_path: Path) -> None:
    """These programs are made on request, beside the float programs of their class; the step of one token is
    the same.
    """
    options = BuildOptions(
        SAMPLE, tmp_path, (target,), "q4", buckets=Buckets((1, 16), (1,)),
        device_classes=("software", "mobile"), products=("float", "int8"),
    )  # fmt: skip
    made = Artifact.open(build(options)[0])
    of = {program.name: program for program in made.manifest.programs}
    assert list(of) == [
        "software-f16", "software-f32", "mobile-f16", "mobile-f16-int8", "mobile-f32", "mobile-f32-int8",
    ]  # fmt: skip
    finalists = line_up(made.manifest.programs, "mobile")
    assert [program.name for program in finalists] == ["mobile-f16", "mobile-f16-int8", "mobile-f32"]
    for precision in ("f16", "f32"):
        plain, rounded = of[f"mobile-{precision}"], of[f"mobile-{precision}-int8"]
        assert set(rounded.requires.features) == {*plain.requires.features, feature}
        steps = [
            {kernel: record.file for kernel, record in program.kernels.items() if "_m1_" in kernel}
            for program in (plain, rounded)
        ]
        assert steps[0]
        assert steps[0] == steps[1]
    # The error names what a device lacks.
    with pytest.raises(DeviceError, match=f"mobile-f32-int8 needs feature {feature}"):
        made.able_programs(Found(frozenset()), name="mobile-f32-int8")


def test_cooperative_matrices_are_a_program_of_discrete_gpus_on_vulkan(tmp_path: Path) -> None:
    options = BuildOptions(
        SAMPLE, tmp_path, ("vulkan",), "q4", buckets=Buckets((1, 64), (1,)),
        device_classes=("software", "discrete"),
    )  # fmt: skip
    made = Artifact.open(build(options)[0])
    of = {program.name: program for program in made.manifest.programs}
    assert list(of) == [
        "software-f16", "software-f32", "discrete-f16", "discrete-f16-cooperative", "discrete-f32",
    ]  # fmt: skip
    plain, multiplied = of["discrete-f16"], of["discrete-f16-cooperative"]
    more = {"cooperativeMatrix", "vulkanMemoryModel", "shaderFloat16", "subgroupBasic"}
    assert set(multiplied.requires.features) == {*plain.requires.features, *more}
    assert multiplied.requires.limits["maxComputeSharedMemorySize"] <= 32768
    with pytest.raises(BuildError, match="has no program with products of cooperative for class software"):
        build(dataclasses.replace(options, device_classes=("software",), products=("cooperative",)))


@pytest.mark.parametrize(
    ("said", "changed"),
    [
        ("unknown products int4; known: float, int8, cooperative", {"products": ("float", "int4")}),
        ("unknown products (none); known: float, int8, cooperative", {"products": ()}),
        ("has no program with products of int8 for class software", {"device_classes": ("software",)}),
        (
            "has products of cooperative",
            {"device_classes": ("mobile",), "products": ("float", "cooperative")},
        ),
        ("matrices of 2, 4 or 8 bits in groups of 32 or more", {"quant": "none"}),
        ("matrices of 2, 4 or 8 bits in groups of 32 or more", {"quant": "q4", "group_size": 16}),
        ("matrices of 2, 4 or 8 bits in groups of 32 or more", {"quant": "q6"}),
    ],
)
def test_products_that_would_not_be_are_refused(said: str, changed: dict[str, Any], tmp_path: Path) -> None:
    options = BuildOptions(SAMPLE, tmp_path, ("vulkan",), **{"products": ("int8",), **changed})
    with pytest.raises(BuildError, match=re.escape(said)):
        build(options)


@pytest.mark.parametrize(("named", "said"), [(("phone", "discrete"), "phone"), ((), "(none)")])
def test_an_unknown_class_is_refused_with_those_there_are(
    named: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    with pytest.raises(BuildError) as refused:
        build(BuildOptions(SAMPLE, tmp_path, ("webgpu",), device_classes=named))
    assert str(refused.value) == f"unknown device class {said}; known: {', '.join(DEVICE_CLASSES)}"


def test_a_file_has_one_hash() -> None:
    data = tiny.manifest_dict()
    kernel = {"file": "kernels/k.wgsl", "entry": "k", "access": ["read"], "sha256": "a" * 64}
    (program,) = data["programs"]
    for name in ("library", "library_sha256"):
        program.pop(name)
    other = {**program, "name": "other", "kernels": {"k": {**kernel, "sha256": "b" * 64}}}
    data["programs"] = [{**program, "kernels": {"k": kernel}}, other]
    with pytest.raises(ArtifactError, match=r"other: kernel k: kernels/k.wgsl has another SHA-256"):
        parse(data, "manifest.json")
