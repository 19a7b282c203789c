"""Lint of English: texts that cannot be understood alone, or that engineers stumble over.

`python scripts/plain_english.py` reads the project's Python and TypeScript and names each docstring that
begins with a word which needs an earlier sentence ("Those of a job."), each one that only repeats the name it
describes, and each comment, docstring or message with one of PHRASES ("is no number"). `make lint` runs it;
CONTRIBUTING.md has the rule with examples.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = (
    "step", "format", "kernels", "targets", "build", "edge_runtime", "remote", "fallback_server", "routing",
    "src/nearfar", "tests", "benchmarks", "examples", "scripts",
)  # fmt: skip
TYPESCRIPT = ("web/src", "web/chat", "web/test")
OPENERS = re.compile(
    r"(Those|That|Of|What of|Such|Its|Their|They|Them|The same|So many|So much|Also|And|Or|But|But for|So)\b"
)
PHRASES = {
    re.compile(
        r"(?<![Tt]here )\b(is|are) no "
        r"(?!longer|more|such|way|room|need|one|different|better|worse|slower|faster|larger)"
    ): "write 'is not a'",
    re.compile(r"(?<![.`{])\banew\b(?![`:}])"): "write 'again'",
    re.compile(r"\b([Tt]he|[Tt]hose|[Tt]hat|[Ww]hat) of before\b"): "name the earlier thing",
    re.compile(r"\b[Ww]hat there is of\b"): "name the thing",
    re.compile(r"\bhangs? on (what|which|whether|how)\b"): "write 'depends on'",
    re.compile(r"\b[Bb]ut for (?!example|instance|now|this reason)"): "write 'except'",
    re.compile(r"\bthat there (is|are)\b(?! (a|an|no|one|any|some)\b)"): "write 'that exist', or name them",
    re.compile(
        r"\bso (many|much)\b(?! (as|of|more|less|fewer|later|time)\b)(?![^.;]*\bthat\b)"
    ): "name the number",
}
"""What is wrong with a phrase wherever text has it, in one line."""
COMMENT = re.compile(r"^[ \t]*/\*\*[ \t\n*]*(?P<text>.*?)\*/", re.MULTILINE | re.DOTALL)
EMPTY = frozenset(
    [
        "a",
        "all",
        "an",
        "and",
        "are",
        "as",
        "at",
        "be",
        "by",
        "for",
        "from",
        "in",
        "is",
        "it",
        "its",
        "of",
        "on",
        "one",
        "or",
        "that",
        "the",
        "this",
        "to",
        "with",
    ]
)
"""Words without a meaning of their own."""


def words(text: str) -> set[str]:
    """The words of a text, or of a name in any case style, in lower case and without a plural's s."""
    apart = re.sub(r"([a-z])([A-Z])", r"\1 \2", text).replace("_", " ").lower()
    return {word.rstrip("s") for word in re.findall(r"[a-z0-9]+", apart)}


def repeats(text: str, *names: str) -> bool:
    """Whether a docstring has no word beyond those of the names that it describes."""
    if "`" in text or "[" in text:
        return False
    return words(text) - EMPTY <= words(" ".join(names))


def in_python(source: str) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Yield each docstring, also of constants and fields: its line, its text, and the names that it
    describes.
    """
    outer: dict[ast.AST, str] = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for place, item in enumerate(node.body):
            outer[item] = getattr(node, "name", "")
            text = (
                item.value.value if isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) else 0
            )
            if isinstance(text, str) and (place == 0 or not function):
                named = place == 0 and not isinstance(node, ast.Module) and len(node.body) > 1
                names = (node.name, outer.get(node, "")) if named else ()  # type: ignore[union-attr]
                yield item.lineno, text, names


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield each comment and each string with a blank of a Python file, with its line."""
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in kinds and " " in token.string:
            yield token.start[0], token.string


def faults(path: Path) -> Iterator[str]:
    """Yield the faults of a file, one line each."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        found = list(in_python(source))
    else:
        found = [
            (source.count("\n", 0, match.start()) + 1, match["text"], ())
            for match in COMMENT.finditer(source)
        ]
    written = texts(source) if path.suffix == ".py" else enumerate(source.splitlines(), 1)
    for line, text in written:
        for phrase, advice in PHRASES.items():
            match = phrase.search(" ".join(text.split()))
            if match and path != Path(__file__):
                yield f"{path.relative_to(ROOT)}:{line}: {match[0].strip()!r}: {advice}"
    for line, text, names in found:
        told = " ".join(text.split())
        where = f"{path.relative_to(ROOT)}:{line}: {told[:60]!r}"
        if OPENERS.match(told):
            yield f"{where} begins with a word that needs an earlier sentence: name what it describes"
        elif names and repeats(told, *names):
            yield f"{where} only repeats the name: say what the name does not, or delete it"


def files() -> Iterator[Path]:
    """Yield the project's own sources, without following the package's symlinks to its parts."""
    for folders, suffixes in ((PYTHON, (".py",)), (TYPESCRIPT, (".ts", ".tsx"))):
        for folder in folders:
            for path in sorted((ROOT / folder).rglob("*")):
                if path.suffix in suffixes and "node_modules" not in path.parts and path.resolve() == path:
                    yield path


def main() -> int:
    """Print each fault; returns the exit status."""
    found = [fault for path in files() for fault in faults(path)]
    print("\n".join(found) if found else "docstrings can be understood alone")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
