"""Parses the documentation into pieces that a test can check: pages, fences, links, names, commands."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT

SKIPPED = frozenset({".git", ".venv", "node_modules", "out", "dist", "__pycache__", "site"})
CODE = frozenset({".py", ".pyi", ".ts", ".tsx", ".mjs", ".js", ".json", ".toml", ".sh", ".c", ".html", ".css",
                  ".yaml", ".yml", ".tpl", ".cpp"})  # fmt: skip
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Page:
    """One page of the documentation; `name` is its path in the repository."""

    name: str
    text: str

    @property
    def prose(self) -> str:
        """The page without its fences."""
        return FENCE.sub("", self.text)

    def fences(self, *kinds: str) -> list[str]:
        """The texts of the fences of these languages, in order."""
        found = FENCE.finditer(self.text)
        return [match["text"] for match in found if (match["info"].split() or [""])[0] in kinds]

    def spans(self) -> list[str]:
        """The pieces of inline code, each on one line."""
        found = re.findall(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", self.prose, re.DOTALL)
        return [" ".join(text.replace("\\|", "|").split()) for _, text in found]

    def links(self) -> list[str]:
        """The addresses of links and pictures that stay in the repository."""
        prose = re.sub(r"(`+)(?!`).+?\1", "", self.prose, flags=re.DOTALL)
        found = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r"(?:src|href)=\"([^\"]+)\"", prose)
        return [link for link in found if not re.match(r"[a-z]+:", link)]

    def anchors(self) -> set[str]:
        """The anchors of its headings, as GitHub and the site make them."""
        titles = re.findall(r"^#+ +(.+?) *$", self.prose, re.MULTILINE)
        plain = [re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "]", title).lower()) for title in titles]
        return {title.replace(" ", "-") for title in plain}


def page(name: str) -> Page:
    """A page by its path in the repository."""
    return Page(name, (ROOT / name).read_text(encoding="utf-8"))


@cache
def files() -> tuple[str, ...]:
    """All files of the repository, as paths with "/", without files that are built or installed."""
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in SKIPPED]
        found += [(Path(folder) / name).relative_to(ROOT).as_posix() for name in names]
    return tuple(sorted(found))


@cache
def pages() -> tuple[Page, ...]:
    """All pages for readers that describe the present state: neither the changelog nor decisions."""
    tops = ("README.md", "CONTRIBUTING.md", "web/README.md", "examples/sample-model/README.md")
    return tuple(
        page(name)
        for name in files()
        if name in tops
        or (name.startswith(("docs/", "web/docs/")) and name.endswith(".md") and "/decisions/" not in name)
    )


@cache
def decisions() -> tuple[Page, ...]:
    """The records of decisions."""
    return tuple(page(name) for name in files() if name.startswith("docs/decisions/"))


@cache
def words() -> frozenset[str]:
    """Every identifier in the repository's own code."""
    found: set[str] = set()
    for name in files():
        path = ROOT / name
        if path.suffix in CODE or path.name in ("Makefile", "run") or "Dockerfile" in path.name:
            if path.name in ("package-lock.json",) or name.startswith("tests/unit/test_docs"):
                continue
            found.update(re.findall(r"[A-Za-z_]\w*", path.read_text(encoding="utf-8", errors="replace")))
    return frozenset(found)


@cache
def components() -> frozenset[str]:
    """Every suffix of the path of a file or folder: "cpu/pool.py" and "pool.py" of the same file."""
    found = set()
    for name in files():
        parts = name.split("/")
        for end in range(1, len(parts) + 1):
            for start in range(end):
                found.add("/".join(parts[start:end]))
    return frozenset(found)


def exists(path: str) -> bool:
    """Whether the path that a page names exists: the whole path, or a suffix of one. `*`, `{a,b}`, `<name>`
    and a trailing "/" have their usual meanings.
    """
    path = re.sub(r"<[^>]+>", "*", path).rstrip("/").removeprefix("./").removeprefix("../")
    if match := re.match(r"(.*)\{([^}]*)\}(.*)", path):
        return all(exists(match[1] + part + match[3]) for part in match[2].split(","))
    if "*" not in path:
        return path in components()
    wanted = re.compile(re.escape(path).replace(r"\*", "[^/]*"))
    return any(wanted.fullmatch(end) for end in components())
