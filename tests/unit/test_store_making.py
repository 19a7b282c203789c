"""What is built for whom: fakes of the build, real folders."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from nearfar.build.options import BuildOptions
from nearfar.store.making import Runner, artifacts_at

BROWSERS = ("webgpu", "wasm")


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    monkeypatch.setenv("NEARFAR_HOME", str(tmp_path / "home"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    return []


def ask(checkpoint: Path, runner: Runner, built: list[tuple[str, ...]]) -> Path:
    def build(options: BuildOptions) -> None:
        built.append(options.targets)
        for target in options.targets:
            (options.out / target).mkdir(parents=True)
            (options.out / target / "manifest.json").write_text(json.dumps({"target": target}))

    return artifacts_at(
        str(checkpoint), runner, build, lambda _: None, lambda _: nullcontext(lambda *_: None)
    )


def test_a_browser_gets_what_it_may_need_beside_what_is_there(
    built: list[tuple[str, ...]], tmp_path: Path
) -> None:
    """Chrome on Linux has no WebGPU unless it is switched on: the page then runs WebAssembly."""
    model, browser = tmp_path / "model", Runner(BROWSERS, lambda: BROWSERS[0], every=True)
    place = ask(model, Runner(("webgpu",), lambda: "webgpu"), built)
    assert ask(model, browser, built) == place
    assert ask(model, browser, built) == place
    assert built == [("webgpu",), ("wasm",)]


def test_a_device_gets_its_best_alone(built: list[tuple[str, ...]], tmp_path: Path) -> None:
    here = Runner(("cpu", "vulkan"), lambda: "vulkan")
    ask(tmp_path / "model", here, built)
    ask(tmp_path / "model", here, built)
    assert built == [("vulkan",)]
