"""The documentation's statements about the repository are true: files, links, commands, options, names,
extras.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import os
import re
import shlex
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from nearfar.cli import COMMANDS, typer_app
from nearfar.routing import Policy
from tests.support import docs
from tests.support.paths import ROOT

PAGES = [pytest.param(page, id=page.name) for page in docs.pages()]
ALL_PAGES = [*PAGES, *(pytest.param(page, id=page.name) for page in docs.decisions())]
OF_FILES = re.compile(r"[\w.*<>{},/-]+\.(?:py|ts|tsx|mjs|sh|md)|[\w.*<>{},-]+/(?:[\w.*<>{},/-]*/)?")
IN_CODE = re.compile(
    r"(?<![\w/.-])(?:docs|tests|benchmarks|examples|scripts|step|format|kernels|targets|build|edge_runtime"
    r"|remote|fallback_server|routing|web|src)/[\w./-]*\.(?:md|py|tsx?|mjs|sh|json|c|h|html|css)\b"
    r"|docs/decisions/\d{4}\b"
)
NOT_OURS = ("Libraries/",)  # a folder of mlx-swift-lm
# Options and names of other people's programs that pages mention.
FOREIGN_OPTIONS = {
    *("--enable-unsafe-webgpu", "--use-webgpu-adapter", "--no-sandbox", "--unstable-webgpu", "--allow-env"),
    *(
        "--allow-net",
        "--allow-read",
        "--allow-sys",
        "--set",
        "--scheduling-policy",
        "--max-model-len",
        "--require-hashes",
        "--gpus",
        "--help",
        "--write",
        "--target-env",
        "--library-path",
    ),
}
FOREIGN_NAMES = {
    *("PIP_INDEX_URL", "maxComputeWorkGroupSizeX", "ggml_gemv_q4_0_4x4_q8_0", "ggml_vec_dot_q4_0_q8_0"),
    *("BaseConfiguration", "LlamaConfiguration", "ModelConfiguration", "importFunction", "dependentSchemas"),
    *("model_q2", "model_q4", "model_quantized", "host_permissions", "MESA_SHADER_CACHE_DIR"),
    *("package_dir", "FileSystemSyncAccessHandle", "libvulkan_lvp"),
}


@cache
def command_tree() -> Any:
    """nearfar's commands as click commands."""
    return typer.main.get_command(typer_app) if isinstance(typer_app, typer.Typer) else typer_app


def command_of(path: tuple[str, ...]) -> Any:
    """The command of a path, with its module imported; None where there is none."""
    node, context = command_tree(), None
    for name in path:
        if not hasattr(node, "list_commands") or name not in node.list_commands(context):
            return None
        context = node.make_context(name, [name], parent=context, resilient_parsing=True)
        node = node.resolve_command(context, [name])[1]
    return node


@cache
def options_of(path: tuple[str, ...]) -> frozenset[str] | None:
    """The options of a command; None where there is none."""
    node = command_of(path)
    if node is None:
        return None
    named = (name for parameter in node.params for name in (*parameter.opts, *parameter.secondary_opts))
    return frozenset([*named, "--help"])


@cache
def all_options() -> frozenset[str]:
    return frozenset(option for path in all_commands() for option in options_of(path) or ())


@cache
def all_commands() -> tuple[tuple[str, ...], ...]:
    """The paths of all commands; that of `nearfar` itself is empty."""
    found: list[tuple[str, ...]] = [()]
    for path in found:
        node = command_of(path)
        if hasattr(node, "list_commands"):
            found += [(*path, name) for name in node.list_commands(None)]
    return tuple(found)


@cache
def defaults() -> dict[str, set[float]]:
    """The numbers that are an option's default, in any command."""
    found: dict[str, set[float]] = defaultdict(set)
    for path in all_commands():
        for parameter in command_of(path).params:
            if isinstance(parameter.default, int | float):
                found[parameter.opts[0]].add(float(parameter.default))
    return found


def commands(page: docs.Page) -> Iterator[list[str]]:
    """The words after `nearfar` wherever a page writes the command."""
    lines = [
        line for text in page.fences("sh", "bash", "") for line in text.replace("\\\n", " ").splitlines()
    ]
    for line in [*lines, *page.spans()]:
        # "MODEL|URL…" and "[--bits 4.5|--fit 700MB]" of a synopsis are separate words.
        plain = re.sub(r"\s#.*$|[|\[\]]", " ", line)
        found = re.match(
            r"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\S*/bin/|docker run .* )?nearfar (?=[a-z-])(.*)", plain
        )
        if found:
            lexer = shlex.shlex(found[1], posix=True, punctuation_chars="&;>")
            lexer.whitespace_split, lexer.quotes = True, "\"'"
            try:
                words = list(lexer)
            except ValueError:  # the line is prose with an apostrophe
                words = found[1].split()
            ends = next((at for at, word in enumerate(words) if set(word) <= set("&;>")), len(words))
            yield words[:ends]


@pytest.mark.parametrize("page", ALL_PAGES)
def test_every_command_and_option_is_one(page: docs.Page) -> None:
    wrong = []
    for words in commands(page):
        path: tuple[str, ...] = ()
        for word in words:
            if command_of((*path, word)) is None:
                break
            path = (*path, word)
        known = options_of(path)
        named = [word.split("=")[0].rstrip("….,;") for word in words if word.startswith("--")]
        if not path and not words[0].startswith("-"):
            wrong.append(f"nearfar {words[0]}: no such command")
        wrong += [f"nearfar {' '.join(path)} {name}" for name in named if known and name not in known]
    loose = [word for span in page.spans() for word in re.findall(r"(?<![\w-])--[a-z][\w-]+", span)]
    wrong += [word for word in loose if word not in all_options() | FOREIGN_OPTIONS and not in_sources(word)]
    assert not wrong, f"{page.name}: {wrong}"


def in_sources(option: str) -> bool:
    """Whether one of our scripts has the option, through argparse or for a tool that it calls."""
    return any(option in text for text in scripts())


@cache
def scripts() -> tuple[str, ...]:
    found = [name for name in docs.files() if name.startswith(("benchmarks/", "examples/", "scripts/"))]
    return tuple((ROOT / name).read_text() for name in found if name.endswith((".py", ".sh")))


@pytest.mark.parametrize("page", ALL_PAGES)
def test_every_link_leads_somewhere(page: docs.Page) -> None:
    wrong = []
    for link in page.links():
        path, _, anchor = link.partition("#")
        target = ((ROOT / page.name).parent / path).resolve() if path else ROOT / page.name
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert not wrong, f"{page.name}: {wrong}"


def anchors(path: Path) -> set[str]:
    """The anchors of a page."""
    return docs.page(path.relative_to(ROOT).as_posix()).anchors()


@pytest.mark.parametrize("page", ALL_PAGES)
def test_every_section_that_a_page_quotes_exists(page: docs.Page) -> None:
    """Checks titles in quotes after a link to a page (`[x](x.md), "Title"`), and after "see"."""
    prose = " ".join(page.prose.split())
    quoted = [
        (os.path.normpath(Path(page.name).parent / match[1]), match[2])
        for match in re.finditer(r"\]\(([^)#\s]+\.md)\)[,:]? \(?\"([^\"]+)\"", prose)
    ]
    quoted += [(page.name, title) for title in re.findall(r"\b[Ss]ee \"([A-Z][^\"]+)\"", prose)]
    wrong = [f"{name}: {title}" for name, title in quoted if title.rstrip(".,") not in titles(name)]
    assert not wrong, f"{page.name}: {wrong}"


def titles(name: str) -> set[str]:
    """The headings of a page, without backquotes."""
    return {title.replace("`", "") for title in re.findall(r"^#+ +(.+?) *$", docs.page(name).prose, re.M)}


@pytest.mark.parametrize("page", PAGES)
def test_a_default_beside_an_option_is_the_default(page: docs.Page) -> None:
    """Checks the number in "`--drain` (30 s)", "`--max-body` (4 MiB)" and "`--priority` (0 by default"."""
    units = {"KiB": 2**10, "MiB": 2**20, "Mi": 2**20}
    wrong = []
    for name, number, unit in re.findall(
        r"`(--[a-z][a-z-]+)`(?: seconds)? \(([\d.,]+)(?: (KiB|MiB|Mi)\b)?", " ".join(page.prose.split())
    ):
        value = float(number.replace(",", "")) * units.get(unit, 1)
        if value not in defaults()[name]:
            wrong.append(f"{name} ({number} {unit}): {sorted(defaults()[name])}")
    assert not wrong, f"{page.name}: {wrong}"


def test_the_table_of_the_policy_has_its_fields_and_defaults() -> None:
    rows = docs.page("docs/routing.md").text.partition("## Policy")[2].partition("\n## ")[0]
    told: dict[str, str] = {}
    for names, default in re.findall(r"^\| (`[^|]+) \|([^|]*)\|", rows, re.MULTILINE):
        told |= dict.fromkeys(re.findall(r"`(\w+)`", names), default.strip())
    fields = {field.name: field.default for field in dataclasses.fields(Policy)}
    assert set(told) == set(fields)
    wrong = {
        name: (default, fields[name])
        for name, default in told.items()
        if default not in written(fields[name])
    }
    assert not wrong


def written(value: object) -> tuple[str, ...]:
    """The ways in which a page writes a default; a group of fields has no default of its own."""
    if dataclasses.is_dataclass(value):
        return ("",)
    if value is None:
        return ("none",)
    if isinstance(value, str):
        return (f'`"{value}"`',)
    return (json.dumps(value), f"{value:g}", f"{value:g} s")


def test_every_file_that_code_names_is_there() -> None:
    """Checks pages, tests and sources that comments, docstrings and messages of the code name."""
    wrong = []
    for name in docs.files():
        # Tests write files with such names; JSON and the script of vLLM's tests name those of other projects.
        other = name.startswith(("tests/", "web/test/", "scripts/vllm")) or name.endswith(".json")
        if other or Path(name).suffix not in docs.CODE:
            continue
        for path in IN_CODE.findall((ROOT / name).read_text(encoding="utf-8", errors="replace")):
            if not (docs.exists(path) or docs.exists(f"{path}-*")):
                wrong.append(f"{name}: {path}")
    assert not wrong


@pytest.mark.parametrize("page", ALL_PAGES)
def test_every_file_is_there(page: docs.Page) -> None:
    """Checks files and folders in inline code; a path may be shortened at its beginning ("cpu/pool.py")."""
    tops = {name.split("/")[0] for name in docs.files() if "/" in name}
    wrong = []
    for span in page.spans():
        if not OF_FILES.fullmatch(span) or span.startswith(("/", *NOT_OURS)):
            continue
        named = span.endswith((".py", ".ts", ".tsx", ".mjs", ".sh", ".md"))
        if (named or span.split("/")[0] in tops) and not docs.exists(span) and not made(span):
            wrong.append(span)
    assert not wrong, f"{page.name}: {wrong}"


def made(path: str) -> bool:
    """Whether a path belongs to files that a build makes or a reader writes, by its first folder or
    its name.
    """
    return path.split("/")[0] in ("out", "onnx", "model", "models", "dist", "page", "public") or path in (
        "main.js", "main.ts", "worker.ts", "README.md",
    )  # fmt: skip


@pytest.mark.parametrize("page", ALL_PAGES)
def test_every_name_of_code_is_in_the_code(page: docs.Page) -> None:
    """Checks that `CamelCase`, `snake_case`, `call()` and `NEARFAR_VARIABLE` in inline code occur in the
    code.
    """
    wrong = []
    for span in page.spans():
        names = re.findall(r"NEARFAR_[A-Z_]+", span)
        if re.fullmatch(r"[\w.]+(?:\(.*\))?", span):
            called = span.split("(")[0]
            if "(" in span or re.search(r"_|[a-z][A-Z]|^[A-Z][a-z]\w*[A-Z]", called):
                names += re.findall(r"[A-Za-z_]\w*", called)
        wrong += [name for name in names if name not in docs.words() | FOREIGN_NAMES]
    assert not wrong, f"{page.name}: {sorted(set(wrong))}"


@pytest.mark.parametrize("page", ALL_PAGES)
def test_imports_modules_and_extras_exist(page: docs.Page) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    exports = json.loads((ROOT / "web" / "package.json").read_text())["exports"]
    wrong = []
    for named in re.findall(r"(?:nearfar|\.)\[([a-z,]+)\]", page.text):
        wrong += [f"extra {name}" for name in named.split(",") if name not in extras]
    for entry in re.findall(r"[\"'`](nearfar(?:/[a-z./-]+)?)[\"'`]", page.text):
        if f".{entry.removeprefix('nearfar')}" not in exports and not (ROOT / "src" / entry).exists():
            wrong.append(entry)
    for text in page.fences("python"):
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "nearfar":
                module = importlib.import_module(str(node.module))
                wrong += [alias.name for alias in node.names if not hasattr(module, alias.name)]
    for name in re.findall(r"`(nearfar(?:\.\w+)+)`", page.text):
        if not resolves(name):
            wrong.append(name)
    assert not wrong, f"{page.name}: {wrong}"


def parsed(text: str) -> ast.Module:
    """The tree of a snippet; empty for one that is not Python, such as a signature alone."""
    try:
        return ast.parse(text)
    except SyntaxError:
        return ast.Module([], [])


def resolves(dotted: str) -> bool:
    """Whether a dotted name is a module, or a name in a module."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


@pytest.mark.parametrize("page", ALL_PAGES)
def test_every_make_target_and_npm_script_exists(page: docs.Page) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    package = json.loads((ROOT / "web" / "package.json").read_text())["scripts"]
    code = "\n".join([*page.fences("sh", "bash", ""), *page.spans()])
    wrong = [
        f"make {name}" for name in re.findall(r"^make ([a-z]+)\b", code, re.MULTILINE) if name not in targets
    ]
    scripts_named = re.findall(r"\bnpm run (?:--silent )?([\w:]+)", code)
    wrong += [f"npm run {name}" for name in scripts_named if name not in package]
    assert not wrong, f"{page.name}: {wrong}"


def test_the_readme_is_short_and_shows_pictures() -> None:
    readme = docs.page("README.md")
    assert len(readme.text.splitlines()) <= 150
    assert sum(link.endswith((".png", ".svg", ".webp")) for link in readme.links()) >= 2


def test_every_command_is_in_the_readme() -> None:
    listed = docs.page("README.md").text.partition("## Commands")[2].partition("\n## ")[0]
    assert {
        name for name in COMMANDS if f"`{name}" not in listed and f"nearfar {name}" not in listed
    } == set()


def test_the_glossary_has_at_most_60_terms_that_the_project_uses() -> None:
    rows = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").partition("## Glossary")[2]
    terms = re.findall(r"^\| ([\w -]+?)(?: / [\w -]+)? \| (?!meaning)", rows, re.MULTILINE)
    terms = [term for term in terms if set(term) - {"-"}]
    assert 40 < len(set(terms)) == len(terms) <= 60
    code = [file for folder in ("step", "edge_runtime") for file in (ROOT / folder).rglob("*.py")]
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    texts = [file.read_text(encoding="utf-8") for file in [*code, *pages] if file.name != "architecture.md"]
    words = re.sub(r"\s+", " ", "\n".join(texts)).lower()
    assert [term for term in terms if term.lower() not in words] == []


def test_every_model_file_is_in_the_table_of_models() -> None:
    """Checks that the page of models names each architecture of `step/models/*.py`."""
    told = docs.page("docs/models.md").text
    from nearfar.step.models import architectures

    assert [name for name in architectures() if f"`{name}`" not in told] == []


def test_every_target_is_in_the_table_of_targets() -> None:
    from nearfar.build.targets import target_names

    targets = docs.page("docs/targets.md").text
    assert [name for name in target_names() if f"| `{name}` |" not in targets] == []
