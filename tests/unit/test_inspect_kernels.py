"""`nearfar inspect --kernels`: the launches of an artifact, with the figures that its build computed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from nearfar.build.options import BuildOptions
from nearfar.build.synth import ConfigShape, write_checkpoint
from nearfar.format.adapters import DEVICE_CLASSES
from nearfar.kernels.buckets import Buckets
from tests.support import tiny
from tests.support.commands import nearfar
from tests.support.turns import paired

CONFIG = {**tiny.CONFIG, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
WITHOUT_TVM = "import sys; sys.modules['tvm'] = None; from nearfar.cli import app; app()"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command where TVM cannot be imported."""
    with mock.patch.dict(sys.modules, {"tvm": None}):
        return nearfar(*arguments)


def run_alone(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, in which TVM was not imported before."""
    command = [sys.executable, "-c", WITHOUT_TVM, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module", params=paired(("webgpu",), DEVICE_CLASSES), ids=lambda of: of[1])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact for the CPU or for one class of GPUs, with two steps: computing all figures takes 30 CPU
    seconds.
    """
    root = tmp_path_factory.mktemp("figures")
    write_checkpoint(ConfigShape(CONFIG), root / "checkpoint")
    target, device_class = request.param
    options = ["--target", f"{target},cpu", "--cpu-features", "native", "--device-class", device_class]
    fewer = partial(BuildOptions, buckets=Buckets((1, 64), (1,)))
    with mock.patch("nearfar.cli.build.BuildOptions", fewer):
        done = nearfar(
            "build", root / "checkpoint", "--quant", "q4", *options, "--kernel-figures", "-o", root / "out"
        )
    assert done.returncode == 0, done.stderr
    return root / "out"


def manifest(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / "manifest.json").read_text()))


def test_every_launch_has_the_figures_of_its_kernel(built: Path) -> None:
    shown = run_alone("inspect", built / "webgpu", "--kernels", "--json")
    assert shown.returncode == 0, shown.stderr
    report = json.loads(shown.stdout)
    programs = manifest(built / "webgpu")["programs"]
    planned = [
        (name, bucket["size"], program["name"], launch["kernel"], launch["grid"])
        for program in programs
        for name, buckets in program["functions"].items()
        for bucket in buckets
        for launch in json.loads((built / "webgpu" / bucket["plan"]).read_text())["launches"]
    ]
    assert [
        (each["function"], each["size"], each["variant"], each["kernel"]) for each in report["launches"]
    ] == [each[:4] for each in planned]
    for launch, (*_, grid) in zip(report["launches"], planned, strict=True):
        kernel = report["figures"][launch["variant"]][launch["kernel"]]
        assert launch["workgroups"] == grid[0] * grid[1] * grid[2] == kernel["workgroups"]
        assert launch["threads"] == launch["workgroups"] * kernel["threads_per_workgroup"]
        assert launch["bytes_in_flight"] == kernel["bytes_in_flight"] > 0
        reads_a_matrix = launch["kernel"].startswith(("linear", "project", "embed"))
        assert (launch["weight_reads"] is not None) == reads_a_matrix
    decode = [each for each in report["launches"] if each["kernel"].startswith("linear_m1_")]
    assert decode
    for each in decode:  # columns beyond the last one load the last one once more
        assert each["weight_reads"] == pytest.approx(1, abs=0.05)


def test_a_program_can_be_chosen_and_tables_name_its_kernels(built: Path) -> None:
    first, second, *_ = (program["name"] for program in manifest(built / "webgpu")["programs"])
    shown = run("inspect", built / "webgpu", "--kernels", "--program", second)
    assert shown.returncode == 0, shown.stderr
    assert f"{second}: step of 1" in shown.stdout
    assert f"{first}: step of 1" not in shown.stdout
    refused = run("inspect", built / "webgpu", "--kernels", "--program", "none")
    assert refused.returncode == 1
    assert f"has the programs {first}, {second}" in " ".join(refused.stderr.split())


def test_launches_of_a_library_have_no_figures(built: Path) -> None:
    shown = run("inspect", built / "cpu", "--kernels", "--json")
    assert shown.returncode == 0, shown.stderr
    launch = json.loads(shown.stdout)["launches"][0]
    assert launch["function"] == "step"
    assert (launch["workgroups"], launch["threads"], launch["bytes_in_flight"]) == (None, None, None)
    assert "figures are of GPU kernels" in run("inspect", built / "cpu", "--kernels").stdout


def test_artifacts_side_by_side_come_as_a_list(built: Path) -> None:
    reports = json.loads(run("inspect", built, "--kernels", "--json").stdout)
    assert [report["target"] for report in reports] == ["cpu", "webgpu"]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["programs"][0].pop("figures"),
        lambda data: [program.pop("figures") for program in data["programs"]],
    ],
)
def test_an_artifact_without_figures_says_so_and_shows_its_launches(
    built: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    path = tmp_path / "webgpu"
    path.mkdir()
    for each in (built / "webgpu").iterdir():
        if each.name != "manifest.json":
            (path / each.name).symlink_to(each)
    (path / "manifest.json").write_bytes((built / "webgpu" / "manifest.json").read_bytes())
    tiny.edit_manifest(path, change)
    shown = run("inspect", path, "--kernels")
    assert shown.returncode == 0, shown.stderr
    assert "`nearfar build --kernel-figures` computes them" in " ".join(shown.stdout.split())
    name = manifest(path)["programs"][0]["name"]
    assert f"{name}: step of 1" in shown.stdout
    report = json.loads(run("inspect", path, "--kernels", "--json").stdout)
    assert report["figures"][name] == {}
    of_program = [launch for launch in report["launches"] if launch["variant"] == name]
    assert all(launch["workgroups"] > 0 and launch["threads"] is None for launch in of_program)


def test_a_target_without_plans_says_which_have_launches(tmp_path: Path) -> None:
    from tests.support.mlx_artifact import write_mlx_artifact

    path = write_mlx_artifact(tmp_path / "mlx", tiny.CONFIG, tiny.weights())
    shown = run("inspect", path, "--kernels")
    assert shown.returncode == 1
    assert "mlx has no launches to show" in " ".join(shown.stderr.split())


def test_a_changed_file_of_figures_is_found(built: Path, tmp_path: Path) -> None:
    from nearfar.edge_runtime.artifact.reader import Artifact
    from nearfar.errors import ArtifactError

    path = tmp_path / "webgpu"
    path.mkdir()
    for each in (built / "webgpu").iterdir():
        if each.name != "figures":
            (path / each.name).symlink_to(each)
    (path / "figures").mkdir()
    for each in (built / "webgpu" / "figures").iterdir():
        (path / "figures" / each.name).write_text(each.read_text() + " ")
    with pytest.raises(ArtifactError, match="figures/"):
        Artifact.open(path).verify()
    (path / "figures" / f"{manifest(path)['programs'][0]['name']}.json").write_text('{"kernel": {"a": 1}}')
    assert "holds no figures of kernels" in " ".join(run("inspect", path, "--kernels").stderr.split())
