"""Handles paths that a user gave: recognizes paths among names, suggests existing paths, checks where can be
written.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from nearfar.errors import BuildError

MOST_NAMED = 8
"""The most entries of a folder that a message lists."""


def looks_like_path(given: str) -> bool:
    """Whether a word is clearly a path and no name: it begins at a folder, or goes through several."""
    return given.startswith((".", "/", "~", "\\")) or given.count("/") > 1 or Path(given).is_absolute()


def absent(given: str) -> str | None:
    """The message for a path of which only the beginning exists: a similar path, or the content of the last
    existing folder. None where that folder is the working directory or the root, which hold much, and nothing
    there is similar.
    """
    if meant := close_path(given):
        return f"{given} is not there: did you mean {meant}?"
    folder, _ = _split(given)
    if folder is None or folder.resolve() in (Path.cwd(), Path(folder.anchor or "/").resolve()):
        return None
    names = _names(folder)
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    holds = f"has {', '.join(names[:MOST_NAMED])}{more}" if names else "is empty"
    return f"{given} is not there: {folder} {holds}"


def close_path(given: str) -> str | None:
    """An existing path that differs in one misspelt part; None where there is none."""
    folder, rest = _split(given)
    if folder is None or not rest:
        return None
    for name in get_close_matches(rest[0], _names(folder), 3):
        found = folder.joinpath(name, *rest[1:])
        if found.exists():
            return f"./{found}" if given.startswith("./") else str(found)
    return None


def _split(given: str) -> tuple[Path | None, tuple[str, ...]]:
    """The last existing folder of a path, and the parts after it; None where a file is in the way."""
    path = Path(given).expanduser()
    for folder in path.parents:
        if folder.is_dir():
            return folder, path.parts[len(folder.parts) :]
        if folder.exists():
            break
    return None, ()


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError:
        return []


def check_place(path: Path) -> None:
    """Raise BuildError where an output directory cannot be made: a file is there, or in place of a folder
    above it.
    """
    for place in (path, *path.parents):
        if place.is_dir():
            return
        if place.exists():
            raise BuildError(f"{place} is a file: choose a directory for the output")
