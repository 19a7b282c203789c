"""Writes the bundle files of an artifact (nearfar.format.bundle_files), once all other files are there."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from nearfar.format.bundle_files import bundle, files_of
from nearfar.format.manifest import File, Pack, Program


def write_bundle_files(
    root: Path, tokenizer: Sequence[File], programs: Sequence[Program]
) -> tuple[Pack, ...]:
    """Write `packs/` of the artifact in `root`, and give the manifest's `packs`."""
    common = _write(root, "tokenizer", None, (file.file for file in tokenizer))
    own = (_write(root, f"program-{each.name}", each.name, files_of(each)) for each in programs)
    return (common, *own)


def _write(root: Path, name: str, program: str | None, files: Iterable[str]) -> Pack:
    # The names do not end in .gz or .zz: servers give files of that name a Content-Encoding, and browsers
    # unpack them.
    file = f"packs/{name}.bin"
    content = bundle({path: (root / path).read_bytes() for path in files})
    (root / "packs").mkdir(exist_ok=True)
    (root / file).write_bytes(content)
    return Pack(file, len(content), hashlib.sha256(content).hexdigest(), program)
