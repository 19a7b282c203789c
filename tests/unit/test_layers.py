"""Which part may import which: the table of docs/architecture.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT

MAY_IMPORT: dict[str, set[str]] = {
    "step": set(),
    "format": {"step"},
    "kernels": {"step", "format"},
    "targets": {"step", "format", "kernels"},
    "build": {"step", "format", "kernels", "targets", "edge_runtime"},
    "edge_runtime": {"step", "format"},
    "remote": {"edge_runtime"},
    "fallback_server": {"step", "format", "edge_runtime", "remote"},
    "routing": {"edge_runtime", "remote"},
}
SHARED = {
    "errors",
    "folders",
    "hosts",
    "hub",
    "hub_reach",
    "interruptible",
    "paths",
    "pooling",
    "room",
    "strict_json",
}
SHARED |= {"checkpoint_files", "children", "machine", "pooling", "processors", "suggestions", "__version__"}
"""Modules of the package itself that every part may import."""


def test_each_part_imports_what_its_row_names() -> None:
    wrong = [
        f"{file.relative_to(ROOT)} imports {module}"
        for part, allowed in MAY_IMPORT.items()
        for file in files(part)
        for module in imports(file)
        if module.split(".")[1] not in {part} | allowed | SHARED
    ]
    assert not wrong, "\n".join(wrong)


def test_the_documentation_has_the_same_table() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    for part, allowed in MAY_IMPORT.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{part}/` |"))
        said = row.rstrip("| ").rpartition("|")[2].partition(";")[0]
        assert {other for other in MAY_IMPORT if f"`{other}/`" in said} == allowed, row


def files(part: str) -> Iterator[Path]:
    return (path for path in (ROOT / part).rglob("*.py") if "node_modules" not in path.parts)


@cache
def imports(file: Path) -> tuple[str, ...]:
    """Modules of nearfar that a file imports, for types too; all are named from the root."""
    found: list[str] = []
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "nearfar":
            found += [f"nearfar.{each.name}" for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module)
    return tuple(name for name in found if name.startswith("nearfar."))
