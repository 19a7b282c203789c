"""The target and the model that two pages show are taken from the pages, built and run."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

import nearfar.edge_runtime.executors
import nearfar.step.models
import nearfar.targets
from nearfar.build.options import BuildOptions
from nearfar.build.pipeline import build
from nearfar.build.targets import target_names, target_of
from nearfar.edge_runtime import Engine
from nearfar.edge_runtime.devices import device_names
from tests.support import docs
from tests.support.architectures import CASES, checkpoint
from tests.support.backends import require
from tests.support.cases import Case
from tests.support.parity import SMALL, check_answers

KNOWN = (target_names, target_of, device_names)


@contextmanager
def installed(package: ModuleType, files: dict[str, str], folder: Path) -> Iterator[None]:
    """Within it a package has these files as well, by their paths."""
    root = folder / package.__name__
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    package.__path__.append(str(root))
    for function in KNOWN:
        function.cache_clear()
    importlib.invalidate_caches()
    try:
        yield
    finally:
        package.__path__.remove(str(root))
        for function in KNOWN:
            function.cache_clear()
        added = {f"{package.__name__}.{name.partition('/')[0].removesuffix('.py')}" for name in files}
        for name in [
            name for name in sys.modules if name in added or name.startswith(tuple(f"{a}." for a in added))
        ]:
            del sys.modules[name]


def case_of(name: str) -> Case:
    return next(case for case in CASES if str(case) == name)


def test_the_target_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEARFAR_KERNEL_CACHE", str(tmp_path / "kernels"))
    target, device = docs.page("docs/adding-a-target.md").fences("python")
    assert len([line for line in target.splitlines() if line]) <= 40
    case = case_of("olmo2-plain")  # the layers of this case ask for norms by themselves
    with (
        installed(nearfar.targets, {"plain/__init__.py": "", "plain/target.py": target}, tmp_path),
        installed(nearfar.edge_runtime.executors, {"plain/__init__.py": device}, tmp_path),
    ):
        build(BuildOptions(str(checkpoint(case)), tmp_path / "out", ("plain",), "none"))
        with Engine.load(tmp_path / "out" / "plain", device="plain", kv_memory="4MB") as engine:
            check_answers(case, engine)


def test_the_model_of_the_page(tmp_path: Path) -> None:
    require("mlx-f32")
    (text,) = docs.page("docs/adding-a-model.md").fences("python")
    case = case_of("qwen2-plain")
    root = tmp_path / "checkpoint"
    shutil.copytree(checkpoint(case), root)
    config = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps({**config, "model_type": "example"}))
    with installed(nearfar.step.models, {"example.py": text}, tmp_path):
        build(BuildOptions(str(root), tmp_path / "out", ("mlx",), "none", buckets=SMALL))
        with Engine.load(tmp_path / "out" / "mlx", kv_memory="4MB", precision="f32") as engine:
            check_answers(case, engine)
