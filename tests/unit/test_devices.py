"""Which device is chosen, and the size of a page on it."""

from __future__ import annotations

import dataclasses
import inspect
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner

from nearfar.build.options import BuildOptions
from nearfar.build.targets import target_names
from nearfar.cli import typer_app
from nearfar.cli.chat import chat
from nearfar.cli.run import run
from nearfar.edge_runtime import Engine, devices
from nearfar.edge_runtime.artifact.budget import kv_group, page_bytes, parse_size
from nearfar.edge_runtime.artifact.loading import choose, load
from nearfar.edge_runtime.artifact.options import LoadKeywords, LoadOptions
from nearfar.edge_runtime.devices import device, device_names, parse_device
from nearfar.errors import DeviceError, RequestError
from nearfar.format.manifest_file import parse
from nearfar.store.making import artifacts_at, for_device
from tests.support import tiny

SAMPLE = Path(__file__).parents[2] / "examples" / "sample-model"


@pytest.fixture
def targets(tmp_path: Path) -> Path:
    """A directory of artifacts for every target."""
    for name in device_names():
        (tmp_path / name).mkdir()
        tiny.save_manifest(tmp_path / name, tiny.manifest_dict(target=name))
    return tmp_path


def prefer(monkeypatch: pytest.MonkeyPatch, **ranks: int) -> None:
    """Pretend that the machine's devices have these preferences."""
    for name in device_names():
        changed = dataclasses.replace(device(name), preferred=partial(ranks.get, name, 0))
        monkeypatch.setattr(f"nearfar.edge_runtime.executors.{name}.DEVICE", changed)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [({}, "cpu"), ({"webgpu": 1}, "webgpu"), ({"mlx": 2}, "mlx"), ({"webgpu": 1, "mlx": 2}, "mlx")],
)
def test_the_best_device_is_taken(
    targets: Path, monkeypatch: pytest.MonkeyPatch, ranks: dict[str, int], expected: str
) -> None:
    prefer(monkeypatch, **ranks)
    assert choose(targets, "auto")[0].target == expected
    assert choose(targets, "webgpu")[0].target == "webgpu"


@pytest.mark.parametrize(
    ("ranks", "given", "target"),
    [({}, "auto", "cpu"), ({"vulkan": 1}, "auto", "vulkan"), ({"mlx": 2, "vulkan": 1}, "auto", "mlx"),
     ({"mlx": 2}, "cpu", "cpu")],
)  # fmt: skip
def test_a_model_is_built_for_the_best_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: dict[str, int], given: str, target: str
) -> None:
    monkeypatch.setenv("NEARFAR_HOME", str(tmp_path))
    prefer(monkeypatch, **ranks)

    def build(options: BuildOptions) -> None:
        for name in options.targets:
            (options.out / name).mkdir(parents=True)
            tiny.save_manifest(options.out / name, tiny.manifest_dict(target=name))

    def bar(_: str) -> NoReturn:
        raise AssertionError("nothing is fetched")

    found = artifacts_at(str(SAMPLE), for_device(given), build, lambda _: None, bar)
    assert [folder.name for folder in found.iterdir() if folder.is_dir()] == [target]


def test_a_single_artifact_needs_no_preference(targets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened() -> int:
        raise AssertionError("opened a GPU for nothing")

    for name in device_names():
        changed = dataclasses.replace(device(name), preferred=opened)
        monkeypatch.setattr(f"nearfar.edge_runtime.executors.{name}.DEVICE", changed)
    assert choose(targets / "mlx", "auto")[0].target == "mlx"
    with pytest.raises(DeviceError, match="holds no artifact for cpu, only for mlx"):
        choose(targets / "mlx", "cpu")


def test_an_artifact_that_python_does_not_run_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "wasm").mkdir()
    tiny.save_manifest(tmp_path / "wasm", tiny.manifest_dict(target="wasm"))
    for path in (tmp_path, tmp_path / "wasm"):
        with pytest.raises(DeviceError, match=r"only for wasm.*nearfar web.*nearfar build --target cpu"):
            choose(path, "auto")
        with pytest.raises(DeviceError, match="holds no artifact for cpu, only for wasm"):
            choose(path, "cpu")


def test_a_page_of_a_quantized_cache() -> None:
    config = {**tiny.CONFIG, "head_dim": 64}
    manifest = parse(tiny.manifest_dict(config), "manifest.json")
    program = manifest.programs[0]
    values = 2 * 2 * 2 * 64 * 16  # keys and values, layers, heads, head_dim, tokens
    assert page_bytes(manifest, program) == (4 * values,)
    assert page_bytes(manifest, program, 8) == (values + values // 64 * 8,)
    assert page_bytes(manifest, program, 4) == (values // 2 + values // 32 * 8,)
    assert (kv_group(64, 8), kv_group(64, 4), kv_group(96, 8)) == (64, 32, 32)
    with pytest.raises(RequestError, match="heads of 80 values"):
        kv_group(80, 4)


def test_a_device_is_its_folder_and_called_like_its_target() -> None:
    """No other file names a new device: commands take the names of devices from the folders."""
    assert set(device_names()) == set(target_names()) - {"wasm"}, "WebAssembly runs in browsers and Node"
    said = " ".join(CliRunner().invoke(typer_app, ["run", "--help"], env={"COLUMNS": "300"}).stdout.split())
    with pytest.raises(RequestError) as refused:
        parse_device("toaster")
    for name in device_names():
        assert name in said
        assert name in str(refused.value)
    quoted = re.compile("|".join(f"[\"']{name}[:\"']" for name in device_names()))
    runtime = Path(devices.__file__).parent
    own = {runtime / "executors" / name for name in device_names()}
    outside = [file for file in runtime.rglob("*.py") if not own & set(file.parents)]
    assert len(outside) > 30
    named = {file.name: quoted.findall(file.read_text(encoding="utf-8")) for file in outside}
    assert {name: found for name, found in named.items() if found} == {}


def test_a_folder_more_is_a_device_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new device needs only its folder."""
    folder = tmp_path / "toaster"
    folder.mkdir()
    record = (
        "DEVICE = Device(lambda which=None: Found(frozenset()), None, int, list, several=True, kv_bits=(3,))"
    )
    (folder / "__init__.py").write_text(f"from nearfar.edge_runtime.devices import Device, Found\n{record}\n")
    code = f"""
import nearfar.edge_runtime.executors as executors
from pathlib import Path
executors.__path__.append({str(tmp_path)!r})
from nearfar.edge_runtime import Engine, devices
print(devices.parse_device("toaster:1"), devices.device_choices(), devices.kv_bits_choices())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "('toaster', '1')" in done.stdout, done.stderr
    assert "toaster:1 or toaster:PART-OF-NAME" in done.stdout
    assert "toaster (3)" in done.stdout


def test_options_have_one_home() -> None:
    """Compares the keywords of Engine.load, the record, and the command line's defaults."""
    fields = {field.name: field.default for field in dataclasses.fields(LoadOptions)}
    assert set(LoadKeywords.__annotations__) == set(fields)
    for command in (run, chat):
        given = {name: parameter.default for name, parameter in inspect.signature(command).parameters.items()}
        assert {name: given[name] for name in fields if name not in ("verify", "ready")} == {
            n: d for n, d in fields.items() if n not in ("verify", "ready")
        }
    with pytest.raises(TypeError, match="colour"):
        LoadOptions(colour="red")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"device": 5}, "device must be a kind of device"),
        ({"threads": "two"}, "threads must be a whole number, not 'two'"),
        ({"threads": True}, "threads must be a whole number, not True"),
        ({"kv_bits": 8.5}, "kv_bits must be a whole number, not 8.5"),
        ({"verify": "no"}, "verify must be true or false"),
        ({"program": 3}, "program must be the name of a program"),
        (
            {"kv_memory": 1e6 + 0.5},
            "kv_memory must be a number of bytes or a size such as 512MB, not 1000000.5",
        ),
        ({"kv_memory": []}, "kv_memory must be a number of bytes or a size"),
        ({"kv_memory": float("nan")}, "kv_memory must be a number of bytes or a size"),
        ({"kv_memory": -1e6}, "kv_memory must be positive"),
        ({"ready": 1}, "ready .* must be all, decode or no, not 1"),
        ({"foo": 1}, "there is no option foo; there are device, kv_memory, context, threads"),
        ({"kv_memery": 1}, "there is no option kv_memery: did you mean kv_memory"),
        ({"progress": 5}, "progress must be a function, not 5"),
        ({"path": None}, "path must be the folder of an artifact, not None"),
        ({"path": 5}, "path must be the folder of an artifact, not 5"),
    ],
)
def test_what_load_is_given_is_checked(option: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said) as refused:
        Engine.load(**{"path": "/no/such/artifact", **option})
    assert refused.value.param == next(iter(option))


def test_a_number_of_bytes_is_a_size() -> None:
    assert [parse_size(size) for size in (1000, 1e3, "1000", "1kB")] == [1000] * 4


def test_where_nothing_else_is_at_hand_a_last_resort_is_taken(
    targets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer(monkeypatch, vulkan=-2, webgpu=-1, mlx=-3, onnx=-4)
    assert choose(targets, "auto")[0].target == "cpu"
    shutil.rmtree(targets / "cpu")
    assert choose(targets, "auto")[0].target == "webgpu"


def test_what_a_device_cannot_do_is_refused_and_who_can_is_named(tmp_path: Path) -> None:
    path = tiny.write_artifact(tmp_path / "tiny")
    with pytest.raises(RequestError, match=r"cpu has no validation layer .*--debug.*; vulkan has"):
        load(path, LoadOptions(debug=True))
    with pytest.raises(
        RequestError,
        match=r"no program with a KV cache of 8 bits .*only of float32: leave .*"
        "nearfar build --target cpu --kv-bits 16,8",
    ):
        load(path, LoadOptions(kv_bits=8))
    with pytest.raises(RequestError, match="threads must be at least 1, not 0"):
        load(path, LoadOptions(threads=0))
