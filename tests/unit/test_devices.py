"""Which device is taken, and how large a page is on it."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest

from nearfar.edge_runtime.artifact.budget import kv_group, page_bytes
from nearfar.edge_runtime.artifact.loading import choose
from nearfar.edge_runtime.devices import device, device_names
from nearfar.errors import DeviceError, RequestError
from nearfar.format.manifest import parse
from tests.support import tiny


@pytest.fixture
def targets(tmp_path: Path) -> Path:
    """A directory of artifacts for every target."""
    for name in device_names():
        (tmp_path / name).mkdir()
        tiny.save_manifest(tmp_path / name, tiny.manifest_dict(target=name))
    return tmp_path


def prefer(monkeypatch: pytest.MonkeyPatch, **ranks: int) -> None:
    """Pretend that the machine's devices are preferred so much."""
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


def test_a_single_artifact_needs_no_preference(targets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened() -> int:
        raise AssertionError("opened a GPU for nothing")

    for name in device_names():
        changed = dataclasses.replace(device(name), preferred=opened)
        monkeypatch.setattr(f"nearfar.edge_runtime.executors.{name}.DEVICE", changed)
    assert choose(targets / "mlx", "auto")[0].target == "mlx"
    with pytest.raises(DeviceError, match="holds no artifact for cpu, only for mlx"):
        choose(targets / "mlx", "cpu")


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
