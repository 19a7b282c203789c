"""`nearfar bench kernels`: the cost of each launch of a step, on every device that runs plans."""

from __future__ import annotations

import json
import re
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from nearfar.edge_runtime.artifact.options import LoadOptions
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.devices import device_names
from nearfar.edge_runtime.profiling.measure import Profile, ProfileOptions, profile
from nearfar.errors import DeviceError
from tests.support.artifacts import Built
from tests.support.backends import require
from tests.support.commands import nearfar

GRAPHS = ("mlx", "onnx")
PLANNED = [name for name in device_names() if name not in GRAPHS]
FIELDS = {"function", "kernel", "variant", "workgroups", "microseconds", "bytes", "gb_per_s", "share"}
SLACK, NOISE = 2, 50_000
"""The factor and the µs by which the sum of all launches may exceed the step without stamps: the machine runs
other programs too, and a pass for each launch costs more than one for all. Confusing ticks, nanoseconds and
microseconds would be at least 10 times off.
"""


def bench(path: Path, *options: object) -> subprocess.CompletedProcess[str]:
    return nearfar("bench", "kernels", path, *options, COLUMNS="160")


def figures(path: Path, folder: Path, *options: object) -> dict[str, Any]:
    """The figures that --json writes."""
    file = folder / "figures.json"
    done = bench(path, "--json", file, *options)
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(file.read_text())
    return made


@pytest.fixture(scope="module")
def out(built: Built) -> Path:
    return built("classics-7M", "q4")


@pytest.fixture(params=PLANNED)
def target(request: pytest.FixtureRequest) -> str:
    require(request.param)
    return str(request.param)


@pytest.mark.parametrize(("rows", "context"), [(1, 100), (64, 64)])
def test_every_launch_has_its_cost(out: Path, tmp_path: Path, target: str, rows: int, context: int) -> None:
    made = figures(out / target, tmp_path, "--rows", rows, "--context", context, "--rounds", 3)
    artifact = Artifact.open(out / target)
    program = next(p for p in artifact.manifest.programs if p.name == made["variant"])
    plan = artifact.plan(next(f for f in program.functions["step"] if f.size == rows))
    launches = made["launches"]
    assert [launch["kernel"] for launch in launches] == [launch.kernel for launch in plan.launches]
    for launch, planned in zip(launches, plan.launches, strict=True):
        assert launch.keys() == FIELDS
        assert (launch["function"], launch["variant"]) == ("step", program.name)
        grid = planned.grid
        assert launch["workgroups"] == (grid[0] * grid[1] * grid[2] if grid else None)
        assert launch["microseconds"] >= 0
        assert launch["bytes"] > 0
    total = sum(launch["microseconds"] for launch in launches)
    assert 0 < total <= SLACK * made["step_microseconds"] + NOISE
    assert 0 < made["fastest_step_microseconds"] <= made["step_microseconds"]
    assert sum(launch["share"] for launch in launches) == pytest.approx(1)
    matrices = [x for x in launches if x["kernel"].startswith("linear")]
    assert min(x["microseconds"] for x in matrices) > 0
    for launch in matrices:
        assert launch["gb_per_s"] == pytest.approx(launch["bytes"] / launch["microseconds"] / 1e3)
    kernels = made["kernels"]
    assert sum(kernel["launches"] for kernel in kernels) == len(launches)
    assert sum(kernel["microseconds"] for kernel in kernels) == pytest.approx(total)
    assert [k["microseconds"] for k in kernels] == sorted((k["microseconds"] for k in kernels), reverse=True)


def test_bytes_are_those_of_weights_cache_and_activations(out: Path, tmp_path: Path, target: str) -> None:
    """A matrix counts as a whole, an embedding with the rows read; attention reads the context, and the
    append before it writes the rows.
    """
    short, long = (
        {launch["kernel"]: launch for launch in figures(out / target, tmp_path, "--context", n)["launches"]}
        for n in (100, 900)
    )
    artifact = Artifact.open(out / target)
    cache = artifact.manifest.caches[0]
    program = next(p for p in artifact.manifest.programs if p.name == next(iter(short.values()))["variant"])
    token = 2 * cache.kv_heads * cache.head_dim * (2 if program.kv_dtype == "float16" else 4)
    grown = {name: long[name]["bytes"] - short[name]["bytes"] for name in short}
    attention = [name for name in grown if re.match(r"attention(?!.*_s1)", name)]
    assert attention
    for name, more in grown.items():
        if name in attention:  # the bytes of the page table's entries count, too
            assert 800 * token <= more <= 801 * token
        else:
            assert 0 <= more <= 4 * 800 / artifact.manifest.cache.page_size
    parts = {t.name: t.bytes for t in artifact.manifest.weights.tensors}
    table = sum(size for name, size in parts.items() if name.startswith("embed."))
    embed, head = next(x for n, x in short.items() if "embed" in n), next(reversed(short.values()))
    assert 0 < embed["bytes"] < 4096
    assert table < head["bytes"] < table + 64 * 1024


@pytest.mark.parametrize("function", ["greedy", "sample", "logprobs"])
def test_the_sampler_can_be_measured_too(out: Path, tmp_path: Path, target: str, function: str) -> None:
    made = figures(out / target, tmp_path, "--function", function, "--rows", 4, "--context", 32)
    assert {launch["function"] for launch in made["launches"]} == {function}
    vocab = Artifact.open(out / target).manifest.model.vocab_size
    assert made["launches"][0]["bytes"] >= 4 * 4 * vocab


def test_the_table_and_the_plot(out: Path, tmp_path: Path) -> None:
    require("cpu")
    plot = tmp_path / "step.svg"
    done = bench(out / "cpu", "--rounds", 1, "--plot", plot)
    assert done.returncode == 0, done.stderr
    artifact = Artifact.open(out / "cpu")
    plan = artifact.plan(artifact.manifest.programs[0].functions["step"][0])
    kernels = {launch.kernel for launch in plan.launches}
    for kernel in kernels:
        assert kernel in done.stdout
    assert re.search(r"launches: .* µs.*whole step: .* µs", " ".join(done.stdout.split()))
    drawn = plot.read_text(encoding="utf-8")
    ElementTree.fromstring(drawn)
    assert not re.search(r"url\([^)#]|href|@import", drawn), "a plot fetches nothing"
    for kernel in kernels:
        assert kernel in drawn


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--function", "prefill"), "no function 'prefill', only step, greedy, sample, logprobs"),
        (("--rows", 60), "60 rows; the nearest is 64, of 1, 2, 4, 8, 16, 32, 64, 256"),
        (("--function", "greedy", "--rows", 64), "64 rows; the nearest is 16, of 1, 4, 16"),
        (("--context", 5000), "5,000 tokens: the model's context is 1,024"),
        (("--rows", 64, "--context", 63), "64 rows do not fit into a context of 63"),
        (("--rounds", 0), "rounds must be at least 1, not 0"),
        (("--program", "f8"), "not 'f8'"),
        (("--plot", "/nowhere/at/all.svg"), "/nowhere/at is not a folder"),
        (("--json", "/nowhere/at/all.json"), "/nowhere/at is not a folder"),
    ],
)
def test_what_cannot_be_measured_is_refused(out: Path, options: tuple[object, ...], said: str) -> None:
    require("cpu")
    done = bench(out / "cpu", *options)
    assert done.returncode == 1
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("device", GRAPHS)
def test_a_device_that_builds_graphs_is_refused_by_name(out: Path, device: str) -> None:
    done = bench(out / device)
    assert done.returncode == 1
    assert f"{device} has no launches to measure" in " ".join(done.stderr.split())


def measured(path: Path, device: str) -> Profile:
    """Measure in this process, so that a test can make a device lack a feature."""
    return profile(path, LoadOptions(device=device, trust=True), ProfileOptions(rounds=1, context=16))


def test_a_queue_without_timestamps_is_refused(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("vulkan")
    from nearfar.edge_runtime.executors.vulkan.binding import require_vulkan

    vk = require_vulkan()
    ask = vk.vkGetPhysicalDeviceQueueFamilyProperties

    def without(handle: Any) -> Any:
        families = list(ask(handle))
        for family in families:
            family.timestampValidBits = 0
        return families

    monkeypatch.setattr(vk, "vkGetPhysicalDeviceQueueFamilyProperties", without)
    with pytest.raises(DeviceError, match="has no timestamps on its queue"):
        measured(out / "vulkan", "vulkan")


def test_an_adapter_without_timestamps_is_refused(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("webgpu")
    from nearfar.edge_runtime.executors.webgpu import device

    there = device.features() - {device.TIMESTAMPS}
    monkeypatch.setattr(device, "features", lambda: there)
    with pytest.raises(DeviceError, match="lacks timestamp-query"):
        measured(out / "webgpu", "webgpu")
