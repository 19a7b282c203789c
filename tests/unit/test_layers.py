"""Checks imports between parts against the table of docs/architecture.md, and that a class has a name of its
own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import combinations
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
    "routing": {"format", "edge_runtime", "remote"},
}
SHARED = {
    "checkpoint_files",
    "children",
    "control_groups",
    "downloads",
    "errors",
    "folders",
    "hosts",
    "hub",
    "interruptible",
    "json_size",
    "machine",
    "memory",
    "paths",
    "pooling",
    "processors",
    "room",
    "strict_json",
    "suggestions",
    "version",
}
"""Modules of the package itself that every part may import."""
SAME_NAMES = {
    ("nearfar.kernels.jobs", "nearfar.step"): "a job has the name of its operation",
    ("nearfar.format.manifest", "nearfar.step"): "the manifest's record of a part of the model",
    ("nearfar.edge_runtime.openai.records", "nearfar.routing.shapes"): "OpenAI's record, here with x_nearfar",
    (
        "nearfar.edge_runtime.executors.vulkan",
        "nearfar.edge_runtime.executors.webgpu",
    ): "parts of two executors",
}
"""Pairs of modules or packages whose classes of one name are the same thing, and why there are two."""


def test_each_part_imports_what_its_row_names() -> None:
    wrong = [
        f"{file.relative_to(ROOT)} imports {module}"
        for part, allowed in MAY_IMPORT.items()
        for file in files(part)
        for module in imports(file)
        if module.startswith("nearfar.") and module.split(".")[1] not in {part} | allowed | SHARED
    ]
    assert not wrong, "\n".join(wrong)


def test_the_documentation_has_the_same_table() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    for part, allowed in MAY_IMPORT.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{part}/` |"))
        said = row.rstrip("| ").rpartition("|")[2].partition(";")[0]
        assert {other for other in MAY_IMPORT if f"`{other}/`" in said} == allowed, row


def test_no_file_imports_itself_through_others() -> None:
    """Imports for types (TYPE_CHECKING) and imports inside functions count."""
    folders = (*MAY_IMPORT, "src/nearfar", "tests", "benchmarks", "examples", "scripts")
    circle = a_circle([file for folder in folders for file in files(folder)], ROOT)
    assert not circle, " imports ".join(circle)


def test_no_two_classes_have_the_same_name() -> None:
    """A class whose name begins with an underscore belongs to its file, and does not count."""
    homes = classes([file for folder in (*MAY_IMPORT, "src/nearfar") for file in files(folder)], ROOT)
    wrong, used = [], set()
    for name, modules in homes.items():
        for one, other in combinations(sorted(modules), 2):
            if listed := next((pair for pair in SAME_NAMES if _are(pair, (one, other))), None):
                used.add(listed)
            else:
                wrong.append(f"{name}: {one} and {other}")
    assert not wrong, "name one of these classes after what it is:\n" + "\n".join(wrong)
    assert used == set(SAME_NAMES), "a pair of SAME_NAMES has no class of one name"


def test_a_shared_name_is_found(tmp_path: Path) -> None:
    one, two = tmp_path / "src/nearfar/one.py", tmp_path / "src/nearfar/two.py"
    one.parent.mkdir(parents=True)
    one.write_text("class A:\n    class C: ...\nclass _B: ...\nclass C: ...\n")
    two.write_text("class A: ...\nclass _B: ...\n")
    assert classes([one, two], tmp_path) == {"A": ["nearfar.one", "nearfar.two"], "C": ["nearfar.one"]}


def classes(every: Iterable[Path], root: Path) -> dict[str, list[str]]:
    """The modules that define each public class at their top level."""
    found: dict[str, list[str]] = {}
    for file in every:
        for node in ast.parse(file.read_bytes()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(module_of(file, root))
    return found


def _are(packages: tuple[str, str], modules: tuple[str, str]) -> bool:
    """Whether the first module is in the first package, and the second in the second."""
    return all(f"{module}.".startswith(f"{part}.") for module, part in zip(modules, packages, strict=True))


def test_a_circle_is_found(tmp_path: Path) -> None:
    names = ("nearfar", "nearfar.one", "nearfar.two", "nearfar.three")
    whole, one, two, three = (tmp_path / f"src/{name.replace('.', '/')}.py" for name in names)
    whole = whole.with_suffix("") / "__init__.py"
    whole.parent.mkdir(parents=True)
    whole.write_text("from nearfar.one import y\n")
    one.write_text("if TYPE_CHECKING:\n    from nearfar.two import x\n")
    two.write_text("def f():\n    from . import three\n")
    three.write_text("import nearfar.one\n")
    assert set(a_circle([whole, one, two, three], tmp_path)) == set(names[1:])
    three.write_text("import json\n")
    imports.cache_clear()
    assert not a_circle([whole, one, two, three], tmp_path)


def a_circle(every: list[Path], root: Path) -> list[str]:
    """The names of modules each of which imports the next, and the last the first; empty where there is no
    cycle.
    """
    modules = {module_of(file, root): file for file in every}
    graph = {name: _among(modules, imports(file, root)) - {name} for name, file in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))  # graphlib lists a module before the modules that import it
    return []


def _among(modules: Iterable[str], names: Iterable[str]) -> set[str]:
    """The modules that names refer to: each name is a module, or something in one."""
    found = (name if name in modules else name.rpartition(".")[0] for name in names)
    return {name for name in found if name in modules}


def files(folder: str) -> Iterator[Path]:
    """The Python files below a folder; links to other folders are not followed."""
    return (path for path in (ROOT / folder).rglob("*.py") if "node_modules" not in path.parts)


def module_of(file: Path, root: Path = ROOT) -> str:
    """The name by which a file of the repository is imported."""
    parts = file.relative_to(root).with_suffix("").parts
    parts = parts[1:] if parts[0] == "src" else ("nearfar", *parts) if parts[0] in MAY_IMPORT else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(file: Path, root: Path = ROOT) -> tuple[str, ...]:
    """The imports of a file, including those for types and in functions: modules, and names with their
    modules before them.
    """
    package = module_of(file.parent / "__init__.py", root).split(".")
    found: dict[str, None] = {}
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            found |= dict.fromkeys(each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join((*above, *([node.module] if node.module else [])))
            found |= dict.fromkeys(f"{base}.{each.name}" for each in node.names)
    return tuple(found)
