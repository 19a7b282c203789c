"""Texts of code from Python's standard library: one to measure perplexity on, one to calibrate with.

    python benchmarks/code_text.py DIR

Every second top-level module, in the order of their names, goes into code-heldout.txt. Of each module that is
long enough the text has 2,000 characters in whole lines, past the first 2,000, which are licence and
documentation. code-calibration.txt has a quarter of the other modules, after each as many
characters of the text that comes with nearfar: 18,000 tokens, half of them code.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

from nearfar.build.calibration.text import SHIPPED

PIECE, SKIPPED = 2000, 2000
"""Characters of a module that are taken, and those before that are not."""


def pieces() -> list[str]:
    """A piece of each module, in the order of their names."""
    found = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = file.read_text(encoding="utf-8")
        if len(text) >= SKIPPED + PIECE:
            start = text.index("\n", SKIPPED) + 1
            found.append(text[start : text.rindex("\n", start, start + PIECE) + 1])
    return found


def mixed(code: list[str]) -> list[str]:
    """The pieces of code, after each as many characters of the shipped text, taken evenly from all of it."""
    shipped = SHIPPED.read_text(encoding="utf-8")
    step = len(shipped) // len(code)
    return [
        part for at, piece in enumerate(code) for part in (piece, shipped[at * step :][: len(piece)] + "\n")
    ]


def main() -> None:
    """Write the two texts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    code = pieces()
    texts = {"heldout": code[::2], "calibration": mixed(code[1::8])}
    for name, parts in texts.items():
        (folder / f"code-{name}.txt").write_text("".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()
