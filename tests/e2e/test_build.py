"""`nearfar build` and `nearfar inspect` as a user runs them."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nearfar.kernels.buckets import Buckets
from tests.shared_data import shared_data
from tests.support.artifacts import Built, build_command
from tests.support.commands import nearfar

LAUNCHES_PER_LAYER = 8
FEW = Buckets((1, 16))
"""Sizes of steps: compiling all of them takes four times as long."""
CLASSES = ("software", "discrete")
"""Two classes of GPUs: all four would be twice the work over the same code."""


def hashes(root: Path) -> dict[str, str]:
    return {
        str(file.relative_to(root)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(root.rglob("*"))
        if file.is_file()
    }


def build_stories(out: Path, *more: object, kernels: Path | None = None) -> str:
    """Build, and give the command's line about kernels. `kernels`: the folder of its kernel cache, by default
    that of all tests.
    """
    model = shared_data("models", "stories260K")
    options = ("--quant", "q4", "--cpu-features", "native", "--device-class", ",".join(CLASSES), *more)
    settings = {} if kernels is None else {"NEARFAR_KERNEL_CACHE": str(kernels)}
    # Each build has a process of its own: what one build leaves in memory must not decide the bytes of the
    # next one.
    done = subprocess.run(
        [*build_command(FEW), str(model), *map(str, options), "-o", str(out)],
        capture_output=True, text=True, timeout=600, env={**os.environ, **settings},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("kernels: ")]
    return line


def kernel_counts(line: str) -> tuple[int, int]:
    """The numbers of cached and of compiled kernels in such a line."""
    said = re.fullmatch(r"kernels: (\d+) kept, (\d+) compiled, \d+\.\d s", line)
    assert said, line
    return int(said[1]), int(said[2])


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stories")
    line = build_stories(out / "a", "--dump-ir", out / "ir", kernels=out / "kernels")
    kept, compiled = kernel_counts(line)
    assert kept == 0
    assert compiled > 0
    return out


def test_the_same_input_gives_the_same_bytes(stories: Path, tmp_path: Path) -> None:
    before = hashes(stories / "kernels")
    line = build_stories(tmp_path / "elsewhere", "--no-kernel-cache", kernels=stories / "kernels")
    assert kernel_counts(line)[0] == 0
    assert hashes(tmp_path / "elsewhere") == hashes(stories / "a")
    assert hashes(stories / "kernels") == before


def test_a_second_build_compiles_nothing_and_gives_the_same_bytes(stories: Path, tmp_path: Path) -> None:
    kept, compiled = kernel_counts(build_stories(tmp_path / "again", kernels=stories / "kernels"))
    assert compiled == 0
    programs = [json.loads(file.read_text())["programs"] for file in stories.glob("a/*/manifest.json")]
    assert kept == sum(len(program["kernels"]) for each in programs for program in each)
    assert hashes(tmp_path / "again") == hashes(stories / "a")


def test_kernels_that_are_damaged_are_compiled_again(stories: Path, tmp_path: Path) -> None:
    kernels = shutil.copytree(stories / "kernels", tmp_path / "kernels")
    sound = hashes(kernels)
    first, second, third, *_ = sorted(kernels.glob("*.program"), key=lambda file: file.stat().st_size)
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 1
    first.write_bytes(data)
    shutil.copy(third, second)  # the file is a valid program, but another one
    kept, compiled = kernel_counts(build_stories(tmp_path / "again", kernels=kernels))
    assert kept > 0
    assert compiled > 0
    assert hashes(tmp_path / "again") == hashes(stories / "a")
    assert hashes(kernels) == sound


def test_dump_ir_writes_the_module_after_each_pass(stories: Path) -> None:
    (program,) = (stories / "ir" / "cpu").iterdir()
    dumped = sorted(path.name for path in program.iterdir())
    assert dumped[0] == "00-model.py"
    assert dumped[-1].endswith("plan-memory.py")
    assert "nearfar.linear" in (program / "00-model.py").read_text()
    assert "nearfar.linear" not in (program / dumped[-1]).read_text()


def test_inspect_tells_what_the_artifact_holds(stories: Path) -> None:
    shown = nearfar("inspect", stories / "a", "--json")
    assert shown.returncode == 0, shown.stderr
    reports = {report["target"]: report for report in json.loads(shown.stdout)}
    assert set(reports) == {"cpu", "webgpu"}
    for report in reports.values():
        dense = [entry["name"] for entry in report["quantization"]["matrices"] if "reason" in entry]
        assert dense == [f"layers.{i}.down" for i in range(5)], "172 inputs are not a multiple of 64"
        for program in report["programs"]:
            buckets = {entry["size"]: entry["launches"] for entry in program["functions"]["step"]}
            assert set(buckets) == set(FEW.step)
            outside = 2  # the embedding and the logits lie outside of the layers
            assert buckets[1] <= 5 * LAUNCHES_PER_LAYER + outside
    assert [p["name"] for p in reports["webgpu"]["programs"]] == [
        f"{name}-{precision}" for name in CLASSES for precision in ("f16", "f32")
    ]


def test_steps_have_the_sizes_that_suit_the_target(built: Built) -> None:
    for target, between in (("cpu", {2, 8, 32}), ("webgpu", set())):
        shown = nearfar("inspect", built("classics-7M", "q4") / target, "--json")
        for program in json.loads(shown.stdout)["programs"]:
            sizes = {entry["size"] for entry in program["functions"]["step"]}
            assert sizes == {1, 4, 16, 64, 256} | between


def test_inspect_is_readable(stories: Path) -> None:
    shown = nearfar("inspect", stories / "a" / "cpu")
    assert shown.returncode == 0
    for word in ("llama", "launches", "not quantized: layers.0.down", "512 tokens"):
        assert word in shown.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--quant", "q7"], "q7"),
        (["--group-size", "48"], "48"),
        (["--target", "cpu,tpu"], "tpu"),
        (["--target", "tpu", "--target", "mlx"], "tpu"),
        (["--target", "cpu", "--target", "mlx", "--group-size", "16"], "mlx"),
        (["--cpu-features", "fast"], "fast"),
        (["--cpu", "host,mips-linux"], "unknown platform mips-linux: --cpu takes x86_64-linux"),
        (["--cpu", "aarch64-macos", "--cpu-features", "native"], "and --cpu is aarch64-macos"),
        (["--device-class", "software,phone"], "phone; known: software, mobile, integrated, discrete"),
    ],
)
def test_options_out_of_range_are_named(args: list[str], said: str, tmp_path: Path) -> None:
    done = nearfar("build", shared_data("models", "stories260K"), *args, "-o", tmp_path / "out")
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("manifest.json"))


def test_unknown_architecture_names_the_known_ones(tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(shared_data("models", "stories260K"), copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    done = nearfar("build", copy, "-o", tmp_path / "out")
    assert done.returncode == 1
    assert "mamba" in done.stderr
    assert "llama" in done.stderr
    assert "nearfar serve" in done.stderr


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "nearfar",
        "build",
        str(shared_data("models", "classics-7M")),
        "--no-kernel-cache",  # without the cache, so that the build still compiles when it is interrupted
        "-o",
        str(tmp_path / "out"),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.rglob("weights/*.bin")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
