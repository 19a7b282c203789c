"""Mutations as patch files: a header that says what breaks and which tests catch it, then a diff.

    Attention over several blocks forgets to rescale the sum of weights.
    area: gpu kernels
    catch: tests/device/test_attention_classes.py -k test_32768_positions
    catch: web/test/windows.test.ts -t "a window"

    diff --git a/… b/…

`catch` lines name selections, the cheapest first: a file of pytest with an optional `-k`, or one of vitest
with an optional `-t`. They name test functions, not their parameters: which of these run can be a matter of
the turn.
`build: web` stands in the header of a mutation that tests see in web/dist alone.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "patches"
MOST_LINES = 3
_KEYS = ("area", "catch", "build")
_DIFF = "diff --git "


class PatchError(Exception):
    """A patch file that cannot be used; the message names the file and what to change."""


@dataclass(frozen=True)
class Selection:
    """Tests of one file: arguments of pytest or of vitest."""

    path: str
    options: tuple[str, ...] = ()

    @property
    def is_web(self) -> bool:
        """Whether vitest runs it."""
        return self.path.startswith("web/")

    def __str__(self) -> str:
        return shlex.join((self.path, *self.options))


@dataclass(frozen=True)
class Mutation:
    """One patch file."""

    file: Path
    breaks: str
    area: str
    catch: tuple[Selection, ...]
    builds_web: bool
    files: tuple[str, ...]
    """Paths of the changed files in the repository."""
    lines: int
    """The number of changed lines of the program: the removed ones, or the added ones where these
    are more.
    """

    @property
    def name(self) -> str:
        """The file's name without its suffix."""
        return self.file.stem


def read_all(folder: Path = FOLDER) -> list[Mutation]:
    """All mutations by name."""
    return [read(file) for file in sorted(folder.glob("*.patch"))]


def read(file: Path) -> Mutation:
    """Read a mutation. Raises PatchError where its header or its diff is invalid."""
    head, mark, diff = file.read_text(encoding="utf-8").partition(_DIFF)
    if not mark:
        raise PatchError(f"{file}: there is no line that begins with {_DIFF!r}: write the diff of git there")
    breaks: list[str] = []
    values: dict[str, list[str]] = {key: [] for key in _KEYS}
    for line in filter(None, map(str.strip, head.splitlines())):
        key, colon, value = line.partition(":")
        if colon and key in _KEYS:
            values[key].append(value.strip())
        elif any(values.values()):
            raise PatchError(
                f"{file}: {line!r} is none of {', '.join(_KEYS)}: see tests/mutations/patches.py"
            )
        else:
            breaks.append(line)
    for what, there in (("a sentence that says what it breaks", breaks), *values.items()):
        if not there and what != "build":
            raise PatchError(f"{file}: the header lacks {what}")
    if values["build"] not in ([], ["web"]):
        raise PatchError(f"{file}: build can be web alone, not {values['build']}")
    return Mutation(
        file=file,
        breaks=" ".join(breaks),
        area=values["area"][0],
        catch=tuple(_selection(file, line) for line in values["catch"]),
        builds_web=bool(values["build"]),
        files=tuple(re.findall(r"^\+\+\+ b/(.+)$", mark + diff, re.MULTILINE)),
        lines=_changed(diff),
    )


def _selection(file: Path, line: str) -> Selection:
    path, *options = shlex.split(line)
    flag = "-t" if path.startswith("web/") else "-k"
    if options and (len(options) != 2 or options[0] != flag):
        raise PatchError(f"{file}: {line!r}: give a file, and after it nothing or {flag} and a word")
    return Selection(path, tuple(options))


def _changed(diff: str) -> int:
    """Count changed lines by hunks of removed and added lines: a replaced line counts once."""
    count = removed = added = 0
    for line in [*diff.splitlines(), " "]:
        if line.startswith(("---", "+++")):
            continue
        if line.startswith("-"):
            removed += 1
        elif line.startswith("+"):
            added += 1
        else:
            count += max(removed, added)
            removed = added = 0
    return count
