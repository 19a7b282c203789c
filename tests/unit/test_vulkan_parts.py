"""The parts of the Vulkan runtime that need no device: choices, barriers, the staging ring, the cache on
disk, error messages.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from nearfar import folders
from nearfar.cli import typer_app
from nearfar.edge_runtime import devices
from nearfar.edge_runtime.artifact.budget import page_bytes, plan_pages
from nearfar.edge_runtime.devices import ListedDevice, parse_device
from nearfar.edge_runtime.executors.vulkan import pipelines
from nearfar.edge_runtime.executors.vulkan.blocks import Region, Ring, choose_kinds
from nearfar.edge_runtime.executors.vulkan.commands import Dispatch, barriers
from nearfar.edge_runtime.executors.vulkan.device import Gpu, MemoryType, select
from nearfar.edge_runtime.found import Found
from nearfar.errors import DeviceError, RequestError
from nearfar.format.manifest_file import parse
from tests.support import tiny
from tests.unit.test_compiling import kernel

GIB = 1 << 30


def kind(flags: str, heap: int, heap_bytes: int) -> MemoryType:
    """A memory type by flags: l: device-local, m: mapped, c: coherent, $: cached."""
    return MemoryType("l" in flags, "m" in flags, "c" in flags, "$" in flags, heap, heap_bytes)


LAVAPIPE = [kind("lmc$", 0, 2 * GIB)]
INTEGRATED = [kind("l", 0, 16 * GIB), kind("lmc", 0, 16 * GIB), kind("lmc$", 0, 16 * GIB)]
WINDOW = [kind("l", 0, 8 * GIB), kind("mc", 1, 16 * GIB), kind("lmc", 2, GIB // 4), kind("mc$", 1, 16 * GIB)]
RESIZABLE = [
    kind("l", 0, 24 * GIB),
    kind("mc", 1, 16 * GIB),
    kind("mc$", 1, 16 * GIB),
    kind("lmc", 0, 24 * GIB),
]
APART = [kind("", 1, 16 * GIB), kind("l", 0, 8 * GIB), kind("mc", 1, 16 * GIB), kind("mc$", 1, 16 * GIB)]


@pytest.mark.parametrize(
    ("types", "direct", "expected"),
    [
        (LAVAPIPE, True, (0, 0, 0, 0, True, True, True)),
        (LAVAPIPE, False, (0, 0, 0, 0, False, False, False)),
        (INTEGRATED, True, (2, 2, 1, 2, True, True, True)),
        (WINDOW, True, (0, 2, 1, 3, False, True, False)),
        (RESIZABLE, True, (3, 3, 1, 2, True, True, False)),
        (APART, True, (1, 1, 2, 3, False, False, False)),
    ],
)
def test_memory_types(types: list[MemoryType], direct: bool, expected: tuple[object, ...]) -> None:
    found = choose_kinds(types, (1 << len(types)) - 1, direct)
    assert (found.large, found.small, found.upload, found.readback) == expected[:4]
    assert (found.large_mapped, found.small_mapped, found.readable) == expected[4:]


def test_memory_types_that_buffers_may_not_have_are_not_taken() -> None:
    assert choose_kinds(RESIZABLE, 0b0111).large == 0


def dispatch(reads: str, writes: str) -> Dispatch:
    return Dispatch(None, None, None, (1, 1, 1), frozenset(reads + writes), frozenset(writes))


def test_a_barrier_stands_only_where_a_launch_depends_on_another() -> None:
    line = [
        dispatch("a", "b"),
        dispatch("a", "c"),  # reads what the first dispatch reads, writes another buffer
        dispatch("b", "d"),  # reads what the first dispatch wrote
        dispatch("c", "e"),  # the second dispatch wrote c, but a barrier came since
        dispatch("f", "c"),  # writes a buffer that has been read
        dispatch("g", "c"),  # writes a buffer that has been written
        dispatch("h", "i"),
    ]
    assert barriers(line) == [False, False, True, False, True, True, False]


def test_the_ring_waits_only_for_what_it_overwrites() -> None:
    submitted, waited = [0], []

    def submit() -> int:
        submitted[0] += 1
        return submitted[0]

    region = Region(None, 4096, 1024, np.zeros(1024, np.uint8))
    ring = Ring(region, submit, waited.append)
    assert ring.most == 256
    for value in (1, 1, 2, 2):
        ring.put(np.full(256, value, np.uint8), value)
    submitted[0] = 2
    assert waited == []
    assert ring.put(np.full(100, 9, np.uint8), 3) == 4096
    assert waited == [1]
    assert ring.put(np.full(150, 9, np.uint8), 3) == 4096 + 112
    assert ring.put(np.full(8, 9, np.uint8), 3) == 4096 + 112 + 160
    assert waited == [1, 1]
    for _ in range(2):
        ring.put(np.full(256, 7, np.uint8), 3)
    assert submitted[0] == 2, "nothing that is still to be handed over was in the way"
    ring.put(np.full(256, 7, np.uint8), 3)
    assert (submitted[0], waited[-1]) == (3, 3), "it was: hand it over, then wait"


def test_the_pipeline_cache_is_written_whole_and_ignored_where_damaged(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "cache.bin"
    assert folders.read_cache(file) == b""
    folders.write_cache(file, b"pipelines" * 100)
    assert folders.read_cache(file) == b"pipelines" * 100
    assert [p.name for p in file.parent.iterdir()] == ["cache.bin"]
    file.write_bytes(file.read_bytes()[:-1])
    assert folders.read_cache(file) == b""
    file.write_bytes(b"short")
    assert folders.read_cache(file) == b""
    # a place that cannot be written to is not an error
    folders.write_cache(Path("/proc/none/cache.bin"), b"x")


def test_pipelines_of_two_drivers_and_of_other_kernels_are_kept_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("NEARFAR_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    a, b, c = (kernel(name)[1] for name in "abc")
    one = pipelines.cache_file("device-driver1", [a, b])
    assert one.parent == tmp_path / "nearfar" / "vulkan"
    assert one == pipelines.cache_file("device-driver1", [b, a]), "however the manifest orders them"
    others = {pipelines.cache_file("device-driver2", [a, b]), pipelines.cache_file("device-driver1", [a, c])}
    assert len({one, *others}) == 3


def test_of_many_artifacts_pipelines_those_unused_for_longest_go(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.bin" for name in "abcd"]
    for at, file in enumerate(files):
        folders.write_cache(file, bytes(100))
        os.utime(file, (at, at))
    os.utime(files[0])
    folders.trim_cache(tmp_path, ".bin", 300, keep=files[1])
    assert sorted(tmp_path.iterdir()) == [files[0], files[1]]
    folders.trim_cache(tmp_path, ".bin", 1, keep=files[1])
    assert list(tmp_path.iterdir()) == [files[1]], "what was just written stays"


def gpu(index: int, name: str) -> Gpu:
    empty = dict.fromkeys(("driver", "version", "kind", "identity"), "")
    return Gpu(
        None,
        index,
        name,
        features=frozenset(),
        limits={},
        memory_types=(),
        memory=0,
        heap=0,
        budgeted=False,
        shared=True,
        queue_family=0,
        portability=False,
        **empty,
    )


def test_a_device_is_named_by_its_number_or_a_part_of_its_name() -> None:
    found = (gpu(0, "NVIDIA RTX 4090"), gpu(1, "Intel(R) Arc"), gpu(2, "llvmpipe"))
    assert [select(which, found).index for which in (None, "1", "arc", "llvm", "4090")] == [0, 1, 1, 2, 0]
    with pytest.raises(
        RequestError, match=r"no Vulkan device 'radeon' here, only vulkan:0 \(NVIDIA RTX 4090\), vulkan:1"
    ):
        select("radeon", found)
    with pytest.raises(RequestError, match="'3'"):
        select("3", found)


def test_what_device_options_mean() -> None:
    assert [parse_device(d) for d in ("auto", "cpu", "vulkan", "vulkan:1", "vulkan:AMD Radeon: Pro")] == [
        ("auto", None), ("cpu", None), ("vulkan", None), ("vulkan", "1"), ("vulkan", "AMD Radeon: Pro"),
    ]  # fmt: skip
    for wrong, message in {
        "gpu": "must be auto, cpu or", "cpu:1": "only vulkan can name", "auto:0": "only vulkan can name",
        "vulkan:": "names no device after the colon",
    }.items():  # fmt: skip
        with pytest.raises(RequestError, match=message):
            parse_device(wrong)


def test_the_cache_of_a_device_with_its_own_memory_is_planned_in_that() -> None:
    manifest = parse(tiny.manifest_dict(), "manifest.json")
    program = manifest.programs[0]
    (page,) = page_bytes(manifest, program)
    assert plan_pages(manifest, program, None, memory=20 * page + manifest.weights.bytes) == (10,)
    with pytest.raises(DeviceError, match="more than the device can give"):
        plan_pages(manifest, program, 30 * page, memory=20 * page)
    assert Found(frozenset(), {"maxStorageBufferRange": 10 * page}).largest_buffer() == 10 * page
    assert Found(frozenset()).largest_buffer() is None


def test_devices_are_listed_and_absent_ones_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> list[ListedDevice]:
        raise DeviceError("no driver: install one")

    shown = [
        ListedDevice(
            "vulkan:0", "Some GPU", "discrete", "some driver", ("shaderInt8",), 8 * 10**9, {"maxX": 12345}
        )
    ]
    for name, listing in (("vulkan", lambda: shown), ("webgpu", absent)):
        changed = dataclasses.replace(devices.device(name), list=listing)
        monkeypatch.setattr(f"nearfar.edge_runtime.executors.{name}.DEVICE", changed)
    run = CliRunner().invoke(typer_app, ["devices", "--limits"])
    assert run.exit_code == 0
    for part in (
        "vulkan:0",
        "Some GPU (discrete, 8.0 GB)",
        "some driver",
        "shaderInt8",
        "maxX: 12,345",
        "no driver: install one",
    ):
        assert part in run.stdout
    data = json.loads(CliRunner().invoke(typer_app, ["devices", "--json"]).stdout)
    assert data["webgpu"] == {"devices": [], "reason": "no driver: install one"}
    assert data["vulkan"]["devices"][0]["limits"] == {"maxX": 12345}


def test_every_target_lists_the_cpu_at_least() -> None:
    (listed,) = devices.device("cpu").list()
    assert listed.memory > 0
