"""Stores the results of program trials on disk, in one file for each artifact and adapter.

A program is noted before it is tried. If the process dies during the trial, the driver may have crashed it,
so a process that reads the note later never tries this program again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import psutil

from nearfar import strict_json
from nearfar.folders import cache_folder, read_cache, write_cache
from nearfar.format.adapters import Adapter


class TrialNotes:
    """The results of trials of one artifact on one adapter.

    The digest of the manifest, which covers all kernels, identifies the artifact. A damaged file is ignored.
    """

    def __init__(self, digest: str, adapter: Adapter) -> None:
        key = json.dumps([digest, dataclasses.asdict(adapter)], sort_keys=True)
        self.file = cache_folder() / "variants" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
        self.lost: tuple[str, ...] = ()
        self._chosen: dict[str, str] = {}
        self._trying: dict[str, Any] | None = None
        self._read()

    def chosen(self, names: Sequence[str]) -> str | None:
        """The program that an earlier trial of `names` chose; None if there was no trial."""
        found = self._chosen.get(" ".join(names))
        return found if found in names else None

    @property
    def busy(self) -> bool:
        """Whether another process is trying programs now."""
        return self._trying is not None

    @property
    def tried(self) -> str | None:
        """The program whose trial is noted as running."""
        return str(self._trying["program"]) if self._trying else None

    def trying(self, name: str) -> None:
        """Note that a program is about to be tried."""
        process = psutil.Process()
        self._trying = {"program": name, "pid": process.pid, "started": process.create_time()}
        self._write()

    def lose(self, name: str) -> None:
        """Note that a program lost the device or failed to run."""
        self.lost = (*self.lost, name)
        self._trying = None
        self._write()

    def stop(self) -> None:
        """Note that a trial ended without a result and without a failed program."""
        self._trying = None
        self._write()

    def keep(self, names: Sequence[str], chosen: str) -> None:
        """Note the result of a trial."""
        self._chosen[" ".join(names)] = chosen
        self._trying = None
        self._write()

    def _read(self) -> None:
        try:
            data = strict_json.loads(read_cache(self.file).decode())
            lost, chosen, trying = data["lost"], data["chosen"], data["trying"]
            self.lost = tuple(str(name) for name in lost)
            self._chosen = {str(names): str(name) for names, name in chosen.items()}
            self._trying = trying if trying is None or _alive(trying) else None
            if trying is not None and self._trying is None:
                self.lose(str(trying["program"]))
        except (ValueError, LookupError, TypeError, AttributeError):
            self.lost, self._chosen, self._trying = (), {}, None

    def _write(self) -> None:
        data = {"lost": self.lost, "chosen": self._chosen, "trying": self._trying}
        write_cache(self.file, json.dumps(data).encode())


def _alive(trying: dict[str, Any]) -> bool:
    """Whether the process that wrote a note is still running."""
    try:
        return bool(psutil.Process(int(trying["pid"])).create_time() == trying["started"])
    except (psutil.Error, ValueError, OverflowError):
        return False
