"""The target, the model and the operation that three pages show are taken from the pages, built and run."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
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
from tests.support.paths import ROOT

PARTS = (
    "step",
    "format",
    "kernels",
    "targets",
    "build",
    "edge_runtime",
    "remote",
    "routing",
    "fallback_server",
)
KNOWN = (target_names, target_of, device_names)


@contextmanager
def installed(package: ModuleType, files: dict[str, str], folder: Path) -> Iterator[None]:
    """While the block runs, a package has these additional files, by their paths."""
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
    case = case_of("olmo2-plain")  # the layers of this case have norms of their own
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


def test_the_operation_of_the_page(tmp_path: Path) -> None:
    """The diffs of the page apply to a copy of the tree, whose tables are then complete, and whose kernels
    compute the operation.
    """
    require("vulkan-f32")
    page = docs.page("docs/adding-an-operation.md")
    parts = [link.name for link in (ROOT / "src/nearfar").iterdir() if link.is_symlink()]
    for folder in (*parts, "src", "tests/support", "tests/device"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=ignored)
    for name in ("tests/__init__.py", "tests/unit/__init__.py", "tests/unit/test_operations.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    paths = f"{tmp_path / 'src'}{os.pathsep}{tmp_path}"

    def run(*command: str, given: str = "") -> None:
        environment = {**os.environ, "PYTHONPATH": paths}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, input=given, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"

    for diff in page.fences("diff"):
        run("git", "apply", given=diff)
    tests = ("tests/unit/test_operations.py", "tests/device/test_layer_norm.py")
    run(sys.executable, "-m", "pytest", "-q", "--noconftest", *tests)
