"""The entries of the store: a folder for each model, with an artifact for each target and an `entry.json`.

A folder without `entry.json` belongs to a build or download that is still running, or was interrupted. Its
`begun.json` says what is being made. It is never run. The next build of the same model continues in it, and
the next build of any model removes useless files from it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from nearfar import strict_json
from nearfar.build.options import Quality
from nearfar.edge_runtime.artifact.finder import MANIFEST, by_target
from nearfar.errors import ArtifactError, StoreError
from nearfar.folders import HOME, cache_folder
from nearfar.format.adapters import DEVICE_CLASSES
from nearfar.suggestions import suggested

ENTRY, BEGUN = "entry.json", "begun.json"
_GONE, _LOCK = ".gone", ".making"
FIRST: Quality = "fast"
"""The default quality. It is left out of names and folder hashes so that entries made before `--quality`
existed stay valid.
"""


@dataclass(frozen=True)
class WantedEntry:
    """The inputs of an entry. `source`: a hub id, or the path of a checkpoint; `quant`: None for a build's
    default; `requantize`: the scheme that a quantized checkpoint gets, None to keep its codes; `adapter`: the
    hub id or the path of a LoRA adapter that is merged into it.
    """

    name: str
    source: str
    quant: str | None = None
    quality: Quality = FIRST
    requantize: str | None = None
    adapter: str | None = None

    @property
    def folder(self) -> str:
        """The name of its folder: its name, and a hash of the other fields."""
        made_of = [self.source, str(self.quant), *([self.quality] if self.quality != FIRST else [])]
        made_of += [f"requantize {self.requantize}"] if self.requantize else []
        made_of += [f"adapter {self.adapter}"] if self.adapter else []
        which = hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:8]
        plain = re.sub(r"[^\w.-]+", "-", self.name, flags=re.ASCII).strip(".-")[:80]
        return f"{plain or 'model'}-{which}"


@dataclass(frozen=True)
class Entry:
    """A model of the store. `mark` tells whether a local checkpoint is still the one that was built; None for
    models of the hub. `finished`: whether its build has ended.
    """

    folder: Path
    wanted: WantedEntry
    mark: str | None = None
    finished: bool = True

    @property
    def targets(self) -> dict[str, Path]:
        """The model's artifacts by target."""
        try:
            return by_target(self.folder)
        except ArtifactError:
            return {}

    @property
    def scheme(self) -> str | None:
        """The quantization of its weights; None where its artifact cannot be read."""
        for folder in self.targets.values():
            with suppress(OSError, ValueError, KeyError, TypeError):
                manifest = strict_json.loads((folder / MANIFEST).read_bytes())
                return str(manifest["quantization"]["scheme"])
        return None

    def narrow(self, target: str) -> bool:
        """Whether its artifact for a target lacks programs for some classes of GPUs."""
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            manifest = strict_json.loads((self.targets[target] / MANIFEST).read_bytes())
            made = {program.get("device_class") for program in manifest["programs"]} - {None}
            return bool(made) and not made >= {*DEVICE_CLASSES}
        return False

    @property
    def bytes(self) -> int:
        """Bytes of all files of the model; while another process removes it, of the files that are left."""
        return sum(_size(Path(folder, name)) for folder, _, names in os.walk(self.folder) for name in names)

    @property
    def used(self) -> datetime:
        """The time of its last use; a time long ago where another process has removed it."""
        file = self.folder / ENTRY if self.finished else self.folder
        try:
            return datetime.fromtimestamp(file.stat().st_mtime, UTC)
        except OSError:
            return datetime.fromtimestamp(0, UTC)

    def touch(self) -> None:
        """Record that it is used now."""
        with suppress(OSError):
            os.utime(self.folder / ENTRY)


class Store:
    """The models below a folder; by default `models` in this user's cache, which NEARFAR_HOME moves."""

    def __init__(self, root: Path | None = None) -> None:
        home = cache_folder()
        if root is None and (file := next((at for at in (home, home.parent) if at.is_file()), None)):
            raise StoreError(
                f"{file} is a file, and the store of models lies below it: set {HOME} to a folder"
            )
        self.root = home / "models" if root is None else root

    def entries(self) -> list[Entry]:
        """All entries, the last used one first. Folders with an unreadable entry are left out."""
        found = [self._read(file) for file in self.root.glob(f"[!.]*/{ENTRY}")]
        return sorted((entry for entry in found if entry), key=lambda entry: entry.used, reverse=True)

    def unfinished(self) -> list[Entry]:
        """Models whose build or download has not ended, by folder where nothing else is known."""
        folders = [path for path in self.root.glob("[!.]*") if path.is_dir() and not (path / ENTRY).exists()]
        named = [(path, self._read(path / BEGUN)) for path in sorted(folders)]
        return [
            Entry(path, read.wanted if read else WantedEntry(path.name, ""), finished=False)
            for path, read in named
        ]

    def is_held(self, entry: Entry) -> bool:
        """Whether a process is building or downloading it now."""
        lock = self._lock(entry.folder.name)
        if not Path(lock.lock_file).exists():
            return False
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return True
        lock.release()
        return False

    def find(self, name: str, among: list[Entry] | None = None) -> Entry | None:
        """Find an entry by name or source; of several with one name, the last used one. A path may be
        relative, or begin with ~.
        """
        every = self.entries() if among is None else among
        sources = {name, str(Path(name).expanduser().resolve())}
        exact = (entry for entry in every if entry.wanted.name == name or entry.wanted.source in sources)
        alike = (entry for entry in every if entry.wanted.name.lower() == name.lower())
        return next(exact, None) or next(alike, None)

    def require(self, name: str) -> Entry:
        """Find a model by name. Raises StoreError where there is none."""
        found = self.find(name)
        if found is None:
            if Path(name).expanduser().exists():
                raise StoreError(
                    f"the store has no model of the path {name!r}: nearfar inspect shows an artifact that "
                    f"lies elsewhere, nearfar pull {name} builds a checkpoint into the store"
                )
            names = sorted(entry.wanted.name for entry in self.entries())
            there = ", ".join(names)
            raise StoreError(
                f"the store has no {name!r}{suggested(name.lower(), names) or f'; it has {there}'}"
                if there
                else f"the store has no {name!r}, nor any other model: nearfar pull NAME gets one"
            )
        return found

    def of(self, wanted: WantedEntry) -> Entry | None:
        """The entry that was made of `wanted`; None where there is none."""
        return self._read(self.root / wanted.folder / ENTRY)

    def keep(self, wanted: WantedEntry, mark: str | None) -> Entry:
        """Write the entry of a finished build into its folder."""
        folder = self.root / wanted.folder
        aside = folder / f".{ENTRY}-{os.getpid()}"
        record = {**dataclasses.asdict(wanted), "mark": mark}
        aside.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        aside.replace(folder / ENTRY)
        (folder / BEGUN).unlink(missing_ok=True)
        return Entry(folder, wanted, mark)

    def remove(self, entry: Entry) -> int:
        """Delete an entry, and give its bytes; other processes see it completely or not at all."""
        size = entry.bytes
        gone = entry.folder.with_name(f".{entry.folder.name}{_GONE}-{secrets.token_hex(4)}")
        try:
            entry.folder.rename(gone)
        except OSError as error:
            raise StoreError(f"{entry.wanted.name} cannot be removed: {error}") from error
        self.clear_removed()
        return size

    @contextmanager
    def begun(self, wanted: WantedEntry) -> Iterator[Path]:
        """Give the folder for a new entry. A failure leaves its files there under the entry's name; an empty
        folder is removed.
        """
        folder = self.root / wanted.folder
        folder.mkdir(parents=True, exist_ok=True)
        record = {**dataclasses.asdict(wanted), "mark": None}
        (folder / BEGUN).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        try:
            yield folder
        finally:
            left = {path.name for path in folder.glob("*")} if folder.is_dir() else set()
            if ENTRY in left:
                (folder / BEGUN).unlink(missing_ok=True)
            elif left == {BEGUN}:
                shutil.rmtree(folder, ignore_errors=True)

    def clear_removed(self) -> None:
        """Delete the rest of removed models, also of those whose removal was interrupted."""
        for gone in self.root.glob(f".*{_GONE}-*"):
            shutil.rmtree(gone, ignore_errors=True)

    def sweep(self) -> None:
        """Delete what dead processes have left and nobody will continue: half-written artifacts, removed
        models, locks. Downloads stay.
        """
        self.clear_removed()
        partial = {path.parent.name for path in self.root.glob("*/.*.partial-*")}
        locked = {path.name[1 : -len(_LOCK)] for path in self.root.glob(f".*{_LOCK}")}
        for name in partial | locked:
            lock = self._lock(name)
            try:
                lock.acquire(timeout=0)
            except (Timeout, OSError):
                continue
            for path in (self.root / name).glob(".*.partial-*"):
                shutil.rmtree(path, ignore_errors=True)
            self._unlock(lock)

    @contextmanager
    def locked(self, wanted: WantedEntry, tell: Callable[[str], None]) -> Iterator[None]:
        """Lock `wanted` against other processes. `tell` gets a line before a wait for another process.

        What was read of the entry before the lock is out of date: another process may have made the entry.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        lock = self._lock(wanted.folder)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            tell(f"another process is making {wanted.name}: waiting for it")
            lock.acquire()
        try:
            yield
        finally:
            self._unlock(lock)

    def _lock(self, folder: str) -> FileLock:
        return FileLock(self.root / f".{folder}{_LOCK}")

    @staticmethod
    def _unlock(lock: FileLock) -> None:
        """Release a lock and delete its file: a waiting process finds it gone, and makes another (filelock
        checks).
        """
        with suppress(OSError):
            Path(lock.lock_file).unlink()
        lock.release()

    def _read(self, file: Path) -> Entry | None:
        try:
            record = strict_json.loads(file.read_text(encoding="utf-8"))
            # newer fields, which older records lack
            later = record.get("quality", FIRST), record.get("requantize"), record.get("adapter")
            wanted = WantedEntry(record["name"], record["source"], record["quant"], *later)
            return Entry(file.parent, wanted, record["mark"])
        except (OSError, ValueError, LookupError, TypeError):
            return None


def _size(file: Path) -> int:
    """Bytes of a file; 0 where it no longer exists."""
    try:
        return file.stat().st_size
    except OSError:
        return 0
