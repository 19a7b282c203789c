"""Writing an output directory so that it appears whole or not at all, even with Ctrl-C, a full disk or two
builds.

While a build runs, these are next to OUT: `.OUT.lock` (locked by the running process; the system releases the
lock when the process dies), `.OUT.partial-PID` (what is being written) and, for a moment at the end,
`.OUT.old-PID` (what is being replaced).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from nearfar import strict_json
from nearfar.errors import BuildError
from nearfar.paths import check_place
from nearfar.room import disk_error


def is_artifact(path: Path) -> bool:
    """Whether the directory holds the manifest of a nearfar artifact, whatever its version."""
    try:
        manifest = strict_json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == "nearfar-artifact"


@contextlib.contextmanager
def output_directory(path: Path, replaceable: Callable[[Path], bool] = is_artifact) -> Iterator[Path]:
    """Give a new directory next to `path` to write into; at the end of the block it becomes `path`.

    An empty directory, or one that `replaceable` accepts, is replaced; an exception (Ctrl-C too) leaves
    `path` as it was and nothing beside it. Raises BuildError where `path` is something else, another process
    is building into it, the disk is full or not writable.
    """
    path = path.expanduser().resolve()
    check_place(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            _recover(path)
            _check_replaceable(path, replaceable)
            partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
            try:
                partial.mkdir()
                yield partial
                _replace(path, partial)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS):
            raise disk_error(error, path.parent, str(error.filename or path.name), 1) from error
        raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of `path`; BuildError naming the process that has it."""
    file = path.with_name(f".{path.name}.lock")
    lock = FileLock(file, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        others = [partial.name.rpartition("-")[2] for partial in _siblings(path, "partial")]
        who = f"process {others[0]}" if others else "another process"
        raise BuildError(
            f"{who} is building into {path}: wait until it ends, or choose another output directory"
        ) from None
    try:
        yield
    finally:
        # The file is unlinked while the lock is held: a waiter that has it open finds it gone and opens a new
        # one (filelock checks that).
        with contextlib.suppress(OSError):
            file.unlink()
        lock.release()


def _siblings(path: Path, kind: str) -> list[Path]:
    """List the directories `.NAME.<kind>-PID` beside `path`."""
    prefix = f".{path.name}.{kind}-"
    return sorted(entry for entry in path.parent.iterdir() if entry.name.startswith(prefix))


def _recover(path: Path) -> None:
    """Remove what a killed process left; we hold the lock, so nobody is using it."""
    for old in _siblings(path, "old"):
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:  # a build was killed between the two renames: the earlier output is still complete
            old.rename(path)
    for partial in _siblings(path, "partial"):
        shutil.rmtree(partial, ignore_errors=True)


def _check_replaceable(path: Path, replaceable: Callable[[Path], bool]) -> None:
    """Raise BuildError instead of replacing a directory that holds somebody's data."""
    if path.is_dir() and any(path.iterdir()) and not replaceable(path):
        raise BuildError(
            f"{path} is not empty and was not written by this command, so it is not overwritten: "
            "choose another output directory or remove it yourself"
        )


def _replace(path: Path, partial: Path) -> None:
    """Move `partial` to `path`, after moving away what was there."""
    if not path.exists():
        partial.rename(path)
        return
    old = path.with_name(f".{path.name}.old-{os.getpid()}")
    path.rename(old)
    try:
        partial.rename(path)
    except BaseException:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)
