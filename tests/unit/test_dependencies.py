"""Each imported package is declared by the extra whose users run the importing code, and no other packages
are declared.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

CODE: dict[str, tuple[str, ...]] = {
    "step": ("",),
    "format": ("",),
    "kernels": ("build",),
    "targets": ("build",),
    "targets/onnx": ("build,onnx",),
    "build": ("build",),
    "build/targets/mlx_function.py": ("build,mlx",),
    "edge_runtime": ("edge",),
    "edge_runtime/artifact": ("edge", "build"),
    "edge_runtime/text": ("edge", "build", "front"),
    "edge_runtime/openai": ("edge", "front"),
    "edge_runtime/tools": ("edge", "front"),
    "edge_runtime/executors/drivers.py": ("server",),
    "edge_runtime/executors/mlx": ("mlx",),
    "edge_runtime/executors/onnx": ("onnx",),
    "edge_runtime/executors/vulkan": ("vulkan",),
    "edge_runtime/grammars/compiler.py": ("grammars",),
    "remote": ("routing", "front"),
    "remote/transport.py": ("front",),
    "routing": ("routing",),
    "routing/fitting.py": ("fit",),
    "fallback_server": ("front",),
    "fallback_server/torch_engine": ("server",),
    "fallback_server/grammars": ("server",),
    "fallback_server/ray_engine": ("ray",),
    "fallback_server/ray_app.py": ("ray",),
    "fallback_server/http/shared_counts.py": ("limits,front",),
    "fallback_server/http/tracing.py": ("tracing,front",),
    "src/nearfar": ("",),
    "src/nearfar/cli/session": ("edge",),
    "src/nearfar/cli/top.py": ("front",),
    "src/nearfar/hub": ("build", "server"),
    "src/nearfar/memory.py": ("edge", "build", "front"),
    "src/nearfar/store": ("build",),
    "src/nearfar/store/serving.py": ("build", "server"),
}
"""For each folder or file, the longest name first, the sets of extras with which users may run it: each set
must have all packages that it imports. "" is nearfar without extras.
"""
UNMET = {
    ("edge_runtime/executors/drivers.py", "triton"): "torch brings it where there is a CUDA",
    ("src/nearfar/store/serving.py", "torch"): "is looked for",
    ("src/nearfar/store/serving.py", "tvm"): "is looked for",
}
NAMELESS = {"ziglang", "opentelemetry-exporter-otlp-proto-http"}
"""Packages that no file imports by their own name: a program, and a part of the name opentelemetry."""
OWN = {"tests", "scripts", "examples", "benchmarks", "sample", "triton"}
"""Modules of the repository that tests import; and Triton, which torch brings where there is CUDA."""
FOR_WORK = {"dev", "docs", "bench", "demo", "clients", "instructor"}
"""Extras of the repository's own tools: tests, documentation, measurements, examples."""
ELSEWHERE = ROOT / "tests" / "clients"
"""Scripts that run in the environments of `make clients`; a missing package fails their test there."""


def imported(path: Path) -> set[str]:
    """Packages that a file imports anywhere, except the standard library and nearfar."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("import_module", "find_spec"):
            found |= {str(a.value) for a in node.args[:1] if isinstance(a, ast.Constant)}
    return {name.partition(".")[0] for name in found} - {*sys.stdlib_module_names, "nearfar", "_typeshed"}


@cache
def files() -> dict[str, set[str]]:
    """The packages that each file of the package imports, by its path in the repository."""
    tops = [name for name in CODE if "/" not in name] + ["src/nearfar"]
    paths = [path for top in tops for path in (ROOT / top).rglob("*.py")]
    kept = [path for path in paths if not any(folder.is_symlink() for folder in path.parents)]
    return {path.relative_to(ROOT).as_posix(): imported(path) for path in kept}


def line(path: str) -> str:
    """The entry of CODE that a file belongs to."""
    return max((name for name in CODE if f"{path}/".startswith(f"{name}/")), key=len)


def packages(extras: str) -> set[str]:
    """All packages that these extras declare, with those of the extras that they name and nearfar's own
    requirements.
    """
    found, waiting = list(PROJECT["dependencies"]), [name for name in extras.split(",") if name]
    while waiting:
        for requirement in map(Requirement, PROJECT["optional-dependencies"][waiting.pop()]):
            if requirement.name == "nearfar":
                waiting += requirement.extras
            else:
                found.append(requirement.name)
    return {canonical(Requirement(text).name) for text in found}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def providers() -> dict[str, list[str]]:
    """For each importable name, the installed packages that provide it."""
    return {name: list(map(canonical, given)) for name, given in metadata.packages_distributions().items()}


def lacking(path: str, names: set[str], extras: str) -> Iterator[str]:
    declared = packages(extras)
    for name in names:
        if (path, name) not in UNMET and not declared & {*providers().get(name, ()), canonical(name)}:
            yield f"{path} imports {name}, which {extras or 'nearfar'} does not declare"


@pytest.mark.parametrize("name", CODE)
def test_what_is_imported_is_declared(name: str) -> None:
    own = {path: names for path, names in files().items() if line(path) == name}
    assert own, f"there is no {name}"
    wrong = [
        told for path, names in own.items() for each in CODE[name] for told in lacking(path, names, each)
    ]
    assert not wrong, "\n".join(sorted(wrong))


def test_what_is_declared_is_imported() -> None:
    """The package itself imports it; packages that only tests and benchmarks import are declared for them."""
    names = set().union(*files().values())
    used = {package for name in names for package in (*providers().get(name, ()), canonical(name))} | NAMELESS
    extras = PROJECT["optional-dependencies"].keys() - FOR_WORK
    unused = {extra: packages(extra) - used for extra in ["", *extras]}
    assert {extra: found for extra, found in unused.items() if found} == {}


def test_what_tests_import_is_installed_for_them() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = re.search(r"^DEV_EXTRAS\s*:= (.+)$", makefile, re.MULTILINE)
    assert extras is not None
    wrong = [
        told
        for path in (ROOT / "tests").rglob("*.py")
        if ELSEWHERE not in path.parents
        for told in lacking(path.name, imported(path) - OWN, extras[1])
    ]
    assert not wrong, "\n".join(sorted(wrong))
