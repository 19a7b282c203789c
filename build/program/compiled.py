"""A compiled program in memory, and as bytes for the kernel cache."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import cast

from nearfar import strict_json
from nearfar.format.conversion import plain, record
from nearfar.format.manifest import Program

_HEADER = 8  # bytes that say how long the record is


@dataclass(frozen=True)
class Compiled:
    """A compiled program: its record in the manifest, and its files by their paths in the artifact."""

    record: Program
    files: Mapping[str, bytes]

    @classmethod
    def of(cls, record: Program, root: Path) -> Compiled:
        """Make it of a record and all files below `root`, which must belong to this program alone."""
        found = sorted(path for path in root.rglob("*") if path.is_file())
        return cls(record, {path.relative_to(root).as_posix(): path.read_bytes() for path in found})

    def write(self, root: Path) -> None:
        """Write the files below `root`."""
        for name, data in self.files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def to_bytes(self, key: str) -> bytes:
        """Serialize the program together with a key; `of_bytes` reads it."""
        sizes = {name: len(data) for name, data in self.files.items()}
        header = json.dumps({"key": key, "record": plain(self.record), "files": sizes}).encode()
        whole = b"".join([len(header).to_bytes(_HEADER, "little"), header, *self.files.values()])
        return zlib.compress(whole, 1)

    @classmethod
    def of_bytes(cls, data: bytes, key: str) -> Compiled | None:
        """Read what `to_bytes` wrote with this key; None for any other bytes."""
        try:
            whole = zlib.decompress(data)
            start = _HEADER + int.from_bytes(whole[:_HEADER], "little")
            header = strict_json.loads(whole[_HEADER:start])
            files: dict[str, bytes] = {}
            for name, size in header["files"].items():
                files[_inside(name)] = whole[start : start + size]
                start += size
            if header["key"] != key or start != len(whole):
                return None
            return cls(cast(Program, record(Program, header["record"])), files)
        except (zlib.error, ValueError, KeyError, TypeError, AttributeError):
            return None


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{name} is not below an artifact")
    return name
