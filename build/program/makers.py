"""Finds the source files that decide what a program is: those that compile it, and all that they import.

They are found by imports instead of listed, so none is forgotten and none counts without reason. A change of
another target, of how weights are read, or of the runtime keeps cached programs valid.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import nearfar

ROOT = Path(nearfar.__file__).parent
IDLE = {
    "nearfar": "names the two halves of the project",
    "nearfar.children": "says what a compiler's environment has",
    "nearfar.control_groups": "says what a container's limits are",
    "nearfar.errors": "says why nothing is compiled",
    "nearfar.folders": "says where zig keeps what it made",
    "nearfar.processors": "says how much is compiled side by side",
}
"""Modules that the compiling code imports without effect on programs, and why; neither they nor their imports
count.
"""
_C = ("*.c", "*.h")


@dataclass(frozen=True)
class _Source:
    """A Python file: a digest of its code, and the names that it imports, modules or not."""

    digest: str
    imports: tuple[str, ...]


@cache
def makers_digest(modules: frozenset[str], root: Path = ROOT) -> str:
    """SHA-256 of what `makers` finds, in hexadecimal: of Python without comments, docstrings and layout."""
    told = hashlib.sha256()
    for path in makers(modules, root):
        said = _source(path, root).digest if path.suffix == ".py" else _sha256(path.read_bytes())
        told.update(f"{path.relative_to(root).as_posix()} {said}\n".encode())
    return told.hexdigest()


def makers(modules: Iterable[str], root: Path = ROOT) -> list[Path]:
    """The files of these nearfar modules, of all nearfar modules that they import, directly or not, and the C
    files in their folders. `root`: the package's folder.
    """
    found: dict[str, Path] = {}
    left = list(modules)
    while left:
        name = left.pop()
        path = None if name in found or name in IDLE else _file(name, root)
        if path is not None:
            found[name] = path
            left += [name.rpartition(".")[0], *_source(path, root).imports]
    folders = {path.parent for path in found.values()} - {root}
    return sorted({*found.values(), *(path for folder in folders for path in _c_files(folder))})


def _file(name: str, root: Path) -> Path | None:
    """The source file of a module; None where nearfar has no module of that name."""
    first, *rest = name.split(".")
    path = root.joinpath(*rest)
    files = (path / "__init__.py", path.with_suffix(".py")) if first == "nearfar" and rest else ()
    return next((file for file in files if file.is_file()), None)


def _c_files(folder: Path) -> Iterator[Path]:
    """The C files of a folder, and of its sub-folders that are not packages."""
    inner = [each for each in folder.iterdir() if each.is_dir() and not (each / "__init__.py").exists()]
    return (path for each in (folder, *inner) for kind in _C for path in each.glob(kind))


@cache
def _source(path: Path, root: Path) -> _Source:
    tree = ast.parse(path.read_bytes())
    imports = tuple(_imports(tree, ["nearfar", *path.parent.relative_to(root).parts]))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [each for each in node.body if not _is_docstring(each)]
    return _Source(_sha256(ast.dump(tree).encode()), imports)


def _imports(tree: ast.Module, package: list[str]) -> Iterator[str]:
    """Yield the names that a module imports, also within functions, but not under TYPE_CHECKING.

    `package`: the parts of the name of the module's package.
    """
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, node.module] if node.module else above)
            yield from (base, *(f"{base}.{each.name}" for each in node.names))
        elif isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            left += node.orelse
        elif not isinstance(node, ast.expr):
            left += ast.iter_child_nodes(node)


def _is_docstring(statement: ast.stmt) -> bool:
    """Whether a statement is a string literal on its own: a docstring, also below a constant."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
