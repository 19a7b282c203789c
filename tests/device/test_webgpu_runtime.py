"""Failures of the WebGPU executor: a lost device is opened again, and an error says what happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nearfar.edge_runtime import Engine, SamplingParams
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.devices import Settings
from nearfar.edge_runtime.executors import planned
from nearfar.edge_runtime.executors.webgpu import device as webgpu_device
from nearfar.edge_runtime.executors.webgpu import executor as webgpu
from nearfar.edge_runtime.executors.webgpu.executor import WebGpuExecutor
from nearfar.errors import ArtifactError, DeviceError, DeviceLost
from tests.shared_data import shared_data
from tests.support.toy_artifact import write_toy_artifact

SCRIPT = [(7 * position) % 500 for position in range(200)]
LENGTHS = (40, 21, 1)


@pytest.fixture(scope="module", autouse=True)
def _adapter() -> None:
    try:
        webgpu_device.adapter()
    except DeviceError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_artifact(tmp_path_factory.mktemp("toy"), shared_data("models", "classics-7M"), SCRIPT)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The wgpu devices that executors open."""
    devices: list[Any] = []
    original = webgpu.open_device

    def open_device(*args: Any) -> Any:
        devices.append(original(*args))
        return devices[-1]

    monkeypatch.setattr(webgpu, "open_device", open_device)
    return devices


def is_lost(device: Any) -> bool:
    try:
        device.create_command_encoder().finish()
    except Exception as error:
        return "lost" in str(error)
    return False


def ask(engine: Engine) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    streams = [engine.generate(SCRIPT[:length], params) for length in LENGTHS]
    return [[event.token for event in stream] for stream in streams]


EXPECTED = [SCRIPT[length : length + 5] for length in LENGTHS]


def test_a_device_destroyed_at_any_call_is_opened_anew_and_no_answer_changes(
    artifact: Path, opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {"left": -1}

    def counted(name: str) -> None:
        original = getattr(WebGpuExecutor, name)

        def call(self: WebGpuExecutor, *args: Any) -> Any:
            calls["left"] -= 1
            if calls["left"] == 0:
                self._device.destroy()
            return original(self, *args)

        monkeypatch.setattr(WebGpuExecutor, name, call)

    for name in ("run", "fetch", "_mapped"):
        counted(name)
    with Engine.load(artifact, device="webgpu", verify=False) as engine:
        core = engine.asynchronous.core
        assert ask(engine) == EXPECTED
        for at in range(1, 16):
            before = core.epoch
            calls["left"] = at
            assert ask(engine) == EXPECTED, f"destroyed at call {at}"
            assert core.epoch == before + (calls["left"] <= 0)
        assert core.epoch > 8
        assert len(opened) == core.epoch + 1
        assert all(is_lost(device) for device in opened[:-1]), "what was lost has been given back"


def test_without_recovery_the_loss_is_told_as_one(artifact: Path) -> None:
    opened = Artifact.open(artifact / "webgpu")
    made = WebGpuExecutor(opened, opened.manifest.programs[0], Settings((4,), 64))
    waiting = made.fetch("sampled", 1)
    made._device.destroy()
    for call in (lambda: made.run("step", 1), lambda: made.run("step", 64), lambda: made.fetch("sampled", 4),
                 lambda: made.copy_page(0, 0, 1), lambda: made.read_pages(0, [0]), waiting):  # fmt: skip
        with pytest.raises(DeviceLost, match="was lost while"):
            call()
    made.close()


def test_a_damaged_shard_is_told_as_one_and_the_device_given_back(tmp_path: Path, opened: list[Any]) -> None:
    path = write_toy_artifact(tmp_path, shared_data("models", "classics-7M"), SCRIPT)
    shard = next((path / "webgpu" / "weights").glob("*.bin"))
    content = shard.read_bytes()
    for damage in (lambda: shard.write_bytes(content[:300]), lambda: shard.write_bytes(b""), shard.unlink):
        damage()
        with pytest.raises(ArtifactError, match=f"{shard.name}.*Copy the artifact again"):
            Engine.load(path, device="webgpu", verify=False)
    assert len(opened) == 3
    assert all(is_lost(device) for device in opened)


def test_whatever_fails_while_a_device_is_opened_gives_it_back(
    artifact: Path, opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no rope")

    monkeypatch.setattr(planned, "rope_table", broken)
    with pytest.raises(DeviceError, match="no rope") as error:
        Engine.load(artifact, device="webgpu", verify=False)
    assert "no room" not in str(error.value)
    assert is_lost(opened[0])
