"""Packs: the small files of an artifact once more, many in one, for who reads it over a network.

A pack is zlib's format (RFC 1950) over a line of JSON, `[[file, bytes], …]`, and those files' bytes, one
after another. There is one of the tokenizer, and one of each program: a device downloads what it runs. They
are compressed here because hosts do so only with the kinds of files that they know.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from itertools import accumulate

from nearfar import strict_json
from nearfar.errors import ArtifactError
from nearfar.format.manifest import Manifest, Program


def packed(files: Mapping[str, bytes]) -> bytes:
    """A pack of files by their paths in the artifact."""
    index = json.dumps([[file, len(content)] for file, content in files.items()])
    return zlib.compress(b"".join([index.encode(), b"\n", *files.values()]), 9)


def unpacked(pack: bytes, name: str) -> dict[str, bytes]:
    """The files in a pack; ArtifactError where it is none. `name` is for messages."""
    try:
        index, _, content = zlib.decompress(pack).partition(b"\n")
        sizes = [(str(file), int(size)) for file, size in strict_json.loads(index.decode())]
        ends = list(accumulate((size for _, size in sizes), initial=0))
        if ends != sorted(ends) or ends[-1] != len(content):
            raise ValueError(f"its index does not tile its {len(content):,} bytes")
    except (zlib.error, ValueError, TypeError) as error:
        raise ArtifactError(f"{name} is no pack ({error}). Copy the artifact again") from error
    return {file: content[begin : begin + size] for (file, size), begin in zip(sizes, ends, strict=False)}


def files_of(program: Program) -> Iterator[str]:
    """What the pack of a program holds: its kernels, library and plans, each once."""
    found = [kernel.file for kernel in program.kernels.values()]
    found += [program.library]
    found += [function.plan for buckets in program.functions.values() for function in buckets]
    yield from dict.fromkeys(file for file in found if file is not None)


def problems(manifest: Manifest) -> Iterator[str]:
    """What does not add up about the packs of a manifest."""
    names = [pack.program for pack in manifest.packs]
    there = {program.name for program in manifest.programs}
    for name in names:
        if name is not None and name not in there:
            yield f"packs has one of {name!r}, which is no program"
    if len(set(names)) < len(names):
        yield f"packs has two of the same: {names}"
