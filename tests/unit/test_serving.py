"""How `nearfar serve` opens a name: as it is, or built."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from pathlib import Path

import pytest

from nearfar.build.options import BuildOptions
from nearfar.cli.progress import bytes_bar
from nearfar.errors import CheckpointError, DeviceError, StoreError
from nearfar.fallback_server.engines import vllm
from nearfar.fallback_server.engines.opening import EngineOptions, open_engine
from nearfar.store import making, serving
from nearfar.store.entries import Store, WantedEntry
from nearfar.store.serving import Preferred, preferred, served

BUILT = Path("built")
GEMMA = {"model_type": "gemma2", "attn_logit_softcapping": 50.0}


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty store, and a checkpoint of each kind."""
    monkeypatch.setenv("NEARFAR_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serving, "check_there", lambda repository: None)  # no network is needed
    llama = {"model_type": "llama"}
    of_hub = {"someone/model": llama, "someone/strange": llama, "someone/gemma-2": GEMMA}
    monkeypatch.setattr(serving, "first_look", look)
    asked = serving.config_at
    monkeypatch.setattr(serving, "config_at", lambda name: of_hub.get(name) or asked(name))
    for name, config in {
        "plain": {},
        "strange": {},
        "mlx": {"quantization": {}},
        "codes": {"quantization_config": {}},
        "capped": {"attn_logit_softcapping": 50.0},
        "unknown": {"model_type": "a_type_of_tomorrow"},
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
        filled = {key: value or {"bits": 4} for key, value in config.items()}
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "llama", **filled}))
    (tmp_path / "mlc").mkdir()
    (tmp_path / "mlc" / "mlc-chat-config.json").touch()
    (tmp_path / "file.gguf").touch()
    (tmp_path / "out" / "cpu").mkdir(parents=True)
    (tmp_path / "out" / "cpu" / "manifest.json").write_text("{}")


def look(given: str) -> None:
    """Replaces the checks of a build, which would contact the hub."""
    if given in ("strange", "someone/strange"):
        raise CheckpointError(f"nearfar cannot build {given}")


def found(given: str, engine: str = "auto", prefers: Preferred = "torch") -> str:
    """`=` if the model is opened as it is, "built" if it is built or fetched first."""
    result = served(given, engine, lambda name, looked=False: BUILT, prefers)
    return "=" if result == given else result


@pytest.mark.parametrize(
    ("given", "gpu_with_vllm", "gpu", "cpu"),
    [
        ("plain", "=", "=", "built"),
        ("strange", "=", "=", "="),  # PyTorch answers with what cannot be built
        ("codes", "=", "built", "built"),
        ("mlx", "built", "built", "built"),
        ("file.gguf", "built", "built", "built"),
        ("out", "=", "=", "="),
        ("someone/model", "=", "=", "built"),
        ("someone/strange", "=", "=", "="),
        ("someone/model-GGUF", "built", "built", "built"),
        ("smollm2:135m", "built", "built", "built"),
        ("http://host:8000", "=", "=", "="),
    ],
)
def test_a_machine_prefers_vllm_on_a_gpu_and_the_artifact_on_a_cpu(
    given: str, gpu_with_vllm: str, gpu: str, cpu: str
) -> None:
    assert found(given, prefers="vllm") == gpu_with_vllm
    assert found(given, prefers="torch") == gpu
    assert found(given, prefers="artifact") == cpu


class Building(Exception):
    """A build has begun."""


@pytest.mark.parametrize("engine", ["auto", "artifact"])
def test_a_checkpoint_is_looked_at_once_before_it_is_built(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    for module in (serving, making):
        monkeypatch.setattr(
            module, "first_look", lambda source, adapter=None: looks.append(Path(source).name)
        )

    def build(options: BuildOptions) -> None:
        raise Building

    def artifacts(given: str, /, *, looked: bool = False) -> Path:
        runner = making.Runner(("cpu",), lambda: making.TargetChoice("cpu"))
        return making.artifacts_at(given, runner, build, lambda text: None, bytes_bar, looked=looked)

    with pytest.raises(Building):
        served("plain", engine, artifacts)
    assert looks == ["plain"]


def test_what_a_machine_prefers_is_told_by_its_driver_and_vllms_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "vllm"
    program.touch(0o755)
    monkeypatch.setattr(serving, "CARD", tmp_path / "nvidiactl")
    monkeypatch.setattr(vllm, "CARD", tmp_path / "nvidiactl")
    assert preferred(str(program)) == "artifact"
    (tmp_path / "nvidiactl").touch()
    assert preferred(str(program)) == "vllm"
    assert preferred(str(tmp_path / "nothing")) == "torch"


@pytest.mark.parametrize(
    ("given", "auto", "artifact", "torch"),
    [
        ("plain", "=", "built", "="),
        ("unknown", "built", "built", "="),
        ("codes", "built", "built", "="),
        ("mlx", "built", "built", "="),
        ("capped", "built", "built", "="),  # the code that opens the file rejects this one
        ("someone/gemma-2", "built", "built", "="),
        ("mlc", "built", "built", None),
        ("file.gguf", "built", "built", None),
        ("out", "=", "built", None),
        ("someone/model", "=", "built", "="),
        ("someone/model:Q4_K_M", "built", "built", None),
        ("someone/model-GGUF", "built", "built", None),
        ("smollm2:135m", "built", "built", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("http://host:8000", "=", "built", None),
        ("http://host/model/manifest.json", "built", "built", None),
    ],
)
def test_by_kind_and_engine(given: str, auto: str, artifact: str, torch: str | None) -> None:
    assert found(given) == auto
    assert found(given, "artifact") == artifact
    if torch is None:
        with pytest.raises(StoreError, match="--engine torch"):
            found(given, "torch")
    else:
        assert found(given, "torch") == torch
    assert found(given, "upstream") == "="


def test_without_torch_all_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_torch_is_there", lambda: False)
    assert {found(given) for given in ("plain", "someone/model", "mlx")} == {"built"}
    assert found("out") == "="


def test_what_is_no_name_is_said_before_anything_is_loaded() -> None:
    for engine in ("auto", "torch"):
        with pytest.raises(StoreError, match="smolm2 is not a file or folder here, not in the store"):
            served("smolm2", engine, lambda name, looked=False: BUILT)


def test_on_windows_the_torch_engine_is_refused_before_a_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert found("plain") == found("someone/model") == "built"
    with pytest.raises(DeviceError, match="which Windows cannot: serve an artifact"):
        asyncio.run(open_engine(("someone/model",), "torch", EngineOptions()))


def test_who_waits_for_another_process_is_told(tmp_path: Path) -> None:
    store, wanted = Store(tmp_path / "store"), WantedEntry("tale", "someone/tale")
    told: list[str] = []
    order: list[str] = []

    def second() -> None:
        with store.locked(wanted, told.append):
            order.append("second")

    thread = threading.Thread(target=second)
    with store.locked(wanted, told.append):
        assert told == []
        thread.start()
        end = time.monotonic() + 60
        while not told:
            assert time.monotonic() < end
            time.sleep(0.01)
        order.append("first")
    thread.join()
    assert (order, told) == (["first", "second"], ["another process is making tale: waiting for it"])


def test_a_model_with_an_adapter_is_built(tmp_path: Path) -> None:
    for name in ("plain", "someone/model"):
        assert served(name, "auto", lambda given, looked=False: BUILT / given, adapter="mine") == str(
            BUILT / name
        )
    for engine in ("torch", "upstream", "vllm"):
        with pytest.raises(StoreError, match=f"--adapter mine is merged by a build, and --engine {engine}"):
            served("plain", engine, lambda given, looked=False: BUILT, adapter="mine")
