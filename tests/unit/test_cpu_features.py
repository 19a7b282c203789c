"""The features that a machine offers to CPU programs, as reported by other systems than this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from nearfar.build.options import BuildOptions
from nearfar.edge_runtime.executors.cpu.library import ffi_library
from nearfar.errors import BuildError
from nearfar.format.machines import KNOWN
from nearfar.format.processor import flags_of
from nearfar.targets.cpu.units import BASELINE, nearest
from nearfar.targets.cpu.variants import variants


@pytest.mark.parametrize("system", ["linux", "android"])
def test_linux_and_android_tell_features_alike(system: str, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nFeatures\t: fp asimd aes asimdhp asimddp i8mm\n")
    assert flags_of(system, "aarch64", cpuinfo) == {"neon", "fullfp16", "dotprod", "i8mm"}


def test_features_that_cannot_be_told_are_none(tmp_path: Path) -> None:
    assert flags_of("linux", "x86_64", tmp_path / "absent") == frozenset()
    assert flags_of("windows", "x86_64") == frozenset()  # only Windows itself can be asked


@pytest.mark.parametrize(
    ("arch", "present", "unit"),
    [
        ("x86_64", {38, 39, 40}, "avx2"),
        ("x86_64", {38, 39, 40, 41}, "avx2"),  # Windows reports only the foundation of AVX-512
        ("aarch64", {19}, "neon"),
        ("aarch64", {19, 43}, "dotprod"),
        ("aarch64", {19, 43, 66, 67}, "i8mm"),
    ],
)
def test_windows_tells_by_number_what_a_processor_has(arch: str, present: set[int], unit: str) -> None:
    assert nearest(arch, flags_of("windows", arch, present=present.__contains__)).name == unit


def test_a_processor_without_avx2_is_told_from_a_windows_too_old_to_be_asked() -> None:
    assert flags_of("windows", "x86_64", present={38, 39}.__contains__) == {"sse4.2", "avx"}
    assert flags_of("windows", "x86_64", present=lambda number: False) == frozenset()


@pytest.mark.parametrize(
    ("system", "name"),
    [("linux", "libtvm_ffi.so"), ("macos", "libtvm_ffi.dylib"), ("windows", "tvm_ffi.dll"),
     ("android", "libtvm_ffi.so")],
)  # fmt: skip
def test_the_library_of_tvm_ffi_has_the_name_that_its_wheel_gives_it(system: str, name: str) -> None:
    assert ffi_library(system) == name


def test_the_nearest_unit_is_the_best_that_a_processor_has() -> None:
    assert nearest("x86_64", KNOWN["x86_64"]).name == "avx512"
    assert nearest("x86_64", BASELINE["x86_64"].features).name == "avx2"
    with pytest.raises(BuildError, match=r"lacks avx2, fma, f16c, bmi2, which kernels for x86_64 need"):
        nearest("x86_64", ("sse4.2", "avx"))


def test_units_of_several_architectures_go_to_the_platforms_that_have_them() -> None:
    def named(cpu: tuple[str, ...], features: tuple[str, ...]) -> list[str]:
        return [made.name for made in variants(BuildOptions("m", Path("o"), cpu=cpu, cpu_features=features))]

    both = ("x86_64-linux", "aarch64-linux")
    assert named(both, ("avx512", "dotprod", "i8mm")) == [
        "x86_64-linux-avx512", "aarch64-linux-dotprod", "aarch64-linux-i8mm",
    ]  # fmt: skip
    with pytest.raises(BuildError, match=r"avx512 names no unit of aarch64-linux: add one of i8mm, dotprod"):
        named(both, ("avx512",))
    with pytest.raises(BuildError, match="no unit of x86_64 is called 'dotprod'"):
        named(("x86_64-linux",), ("avx2", "dotprod"))
