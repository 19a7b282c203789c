"""Hooks of MkDocs in addition to mkdocs.yml: they choose the pages, and make the reference from the code.

Pages keep the paths that they have in the repository, so that a link is right in both. Links to other files
(code, folders) become plain text, since the site shows no code.
"""

from __future__ import annotations

import importlib
import re
import shutil
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File, Files

from nearfar.cli import typer_app

ROOT = Path(__file__).resolve().parents[1]
TYPEDOC = ROOT / "web" / "out" / "api"
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "web/README.md", "web/docs/*.md",
         "examples/sample-model/README.md", "docs/**/*.md", "docs/pictures/*")  # fmt: skip
PUBLIC = ("nearfar.edge_runtime", "nearfar.routing", "nearfar.errors")
"""Packages that are the public Python interface: the names of `__all__`, or the classes of a module without
it.
"""


def on_config(config: Any) -> Any:
    """Append pages without a line in the navigation, such as the decisions, to its end: none is lost."""
    told = set(re.findall(r"[\w./-]+\.md", str(config.nav)))
    pages = {path.relative_to(ROOT).as_posix() for pattern in PAGES for path in ROOT.glob(pattern)}
    untold = sorted(name for name in pages - told if name.endswith(".md"))
    decisions = [name for name in untold if name.startswith("docs/decisions/")]
    config.nav[-1]["Change"].append({"Decisions": decisions})
    config.nav += [{"More": more}] if (more := [name for name in untold if name not in decisions]) else []
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages by their paths in the repository, and the reference; the theme's files stay."""
    kept = [file for file in files if file.src_dir != config.docs_dir]
    pages = [
        File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path))
        for pattern in PAGES
        for path in sorted(ROOT.glob(pattern))
    ]
    reference = {"commands": commands(), "python": python(), "typescript": typescript()}
    made = [File.generated(config, f"reference/{name}.md", content=text) for name, text in reference.items()]
    return Files([*kept, *pages, *made])


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Remove the test marks after a fence's language, and turn links that leave the pages into text."""
    folder = (ROOT / page.file.src_uri).parent
    known = {file.src_uri for file in files}

    def inside(link: re.Match[str]) -> str:
        path = link[2].partition("#")[0]
        if not path or re.match(r"[a-z]+:", path):
            return link[0]
        target = (folder / path).resolve()
        named = target.relative_to(ROOT).as_posix() if target.is_relative_to(ROOT) else ""
        return link[0] if named in known or not target.exists() else link[1]

    markdown = re.sub(r"^(\s*```[a-z]+) [^\n]*$", r"\1", markdown, flags=re.MULTILINE)
    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", inside, markdown)


def on_post_build(config: Any) -> None:
    """Copy TypeDoc's pages, if `npm run docs` has made them."""
    if TYPEDOC.is_dir():
        shutil.copytree(TYPEDOC, Path(config.site_dir) / "reference" / "api", dirs_exist_ok=True)


def commands() -> str:
    """Every command with its arguments and options, as `--help` has them."""
    lines = ["# Commands", "", "What `--help` says of each command.", ""]
    root = typer.main.get_command(typer_app)
    for path, command in _commands(root, ()):
        usage = " ".join(_shown(parameter) for parameter in _arguments(command))
        lines += [f"## nearfar {' '.join(path)}", "", _escaped(command.help or ""), ""]
        lines += [f"`nearfar {' '.join(path)} {usage}`", ""] if usage else []
        options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
        lines += ["| option | |", "|---|---|"] if options else []
        for option in options:
            names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
            lines.append(f"| {names} | {_cell(getattr(option, 'help', '') or '')} |")
        lines.append("")
    return "\n".join(lines)


def _commands(node: Any, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    if not hasattr(node, "list_commands"):
        return [(path, node)]
    context = _context(node, path)
    found = []
    for name in node.list_commands(context):
        found += _commands(node.resolve_command(context, [name])[1], (*path, name))
    return found


def _context(command: Any, path: tuple[str, ...]) -> Any:
    return command.make_context(path[-1] if path else "nearfar", ["-"], resilient_parsing=True)


def _arguments(command: Any) -> list[Any]:
    return [parameter for parameter in command.params if parameter.param_type_name == "argument"]


def _shown(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required else f"[{name}]"


def _cell(text: str) -> str:
    return " ".join(_escaped(text).split()).replace("|", "\\|")


def _escaped(text: str) -> str:
    """Escape HTML in markdown, outside of code."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in parts)


def python() -> str:
    """A page of mkdocstrings' marks, one for each public name."""
    lines = ["# Python", ""]
    for package in PUBLIC:
        module = importlib.import_module(package)
        names = getattr(module, "__all__", None) or [
            name for name, value in vars(module).items() if isinstance(value, type)
        ]
        lines += [f"## {package}", ""]
        for name in names:
            home = getattr(getattr(module, name), "__module__", package)
            lines += [f"::: {home}.{name}", "    options:", "      heading_level: 3", ""]
    return "\n".join(lines)


def typescript() -> str:
    """A page with a link to TypeDoc's pages, or with the command that makes them."""
    told = (
        '<a href="api/index.html">The reference of the npm package</a>, made by TypeDoc.'
        if TYPEDOC.is_dir()
        else "`npm run docs` in `web/` writes the reference of the npm package; `make docs` puts it here."
    )
    return f"# TypeScript\n\n{told}\n"
