"""`nearfar build` and `nearfar inspect` as a user runs them."""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nearfar.format.adapters import DEVICE_CLASSES
from tests.shared_data import shared_data

LAUNCHES_PER_LAYER = 8


def nearfar(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nearfar", *(str(arg) for arg in args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def hashes(root: Path) -> dict[str, str]:
    return {
        str(file.relative_to(root)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(root.rglob("*"))
        if file.is_file()
    }


def build_stories(out: Path, *more: object) -> None:
    model = shared_data("models", "stories260K")
    done = nearfar("build", model, "--quant", "q4", "--cpu-features", "native", *more, "-o", out)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stories")
    build_stories(out / "a", "--dump-ir", out / "ir")
    return out


def test_the_same_input_gives_the_same_bytes(stories: Path, tmp_path: Path) -> None:
    build_stories(tmp_path / "elsewhere")
    assert hashes(tmp_path / "elsewhere") == hashes(stories / "a")


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
        assert dense == [f"layers.{i}.down" for i in range(5)], "172 inputs are no multiple of 64"
        for program in report["programs"]:
            buckets = {entry["size"]: entry["launches"] for entry in program["functions"]["step"]}
            between = {2, 8, 32} if report["target"] == "cpu" else set()
            assert set(buckets) == {1, 4, 16, 64, 256} | between
            outside = 2  # embedding, logits
            assert buckets[1] <= 5 * LAUNCHES_PER_LAYER + outside
    assert [p["name"] for p in reports["webgpu"]["programs"]] == [
        f"{name}-{precision}" for name in DEVICE_CLASSES for precision in ("f16", "f32")
    ]


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


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "nearfar",
        "build",
        str(shared_data("models", "classics-7M")),
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
