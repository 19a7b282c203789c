"""Bundle files (`packs` in the manifest): many small files of an artifact in one, for readers over a network.

A bundle file is compressed by zlib (RFC 1950): a line of JSON, `[[file, bytes], …]`, and those files' bytes,
one after another. The tokenizer and each program have a bundle file, so that a device downloads only what it
runs. Bundle files are compressed because hosts compress only the kinds of files that they know.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from itertools import accumulate

from nearfar import strict_json
from nearfar.errors import ArtifactError
from nearfar.format.manifest import Manifest, Program


def bundle(files: Mapping[str, bytes]) -> bytes:
    """The contents of a bundle file with `files`, given by their paths in the artifact."""
    index = json.dumps([[file, len(content)] for file, content in files.items()])
    return zlib.compress(b"".join([index.encode(), b"\n", *files.values()]), 9)


def unbundled(content: bytes, name: str) -> dict[str, bytes]:
    """The files in a bundle file, by path; ArtifactError if it is damaged. `name` names it in messages."""
    try:
        index, _, files = zlib.decompress(content).partition(b"\n")
        sizes = [(str(file), int(size)) for file, size in strict_json.loads(index.decode())]
        ends = list(accumulate((size for _, size in sizes), initial=0))
        if ends != sorted(ends) or ends[-1] != len(files):
            raise ValueError(f"its index does not tile its {len(files):,} bytes")
    except (zlib.error, ValueError, TypeError) as error:
        raise ArtifactError(f"{name} is not a bundle file ({error}). Copy the artifact again") from error
    return {file: files[begin : begin + size] for (file, size), begin in zip(sizes, ends, strict=False)}


def files_of(program: Program) -> Iterator[str]:
    """The files in a program's bundle file: its kernels, library and plans, each once."""
    found = [kernel.file for kernel in program.kernels.values()]
    found += [program.library]
    found += [function.plan for buckets in program.functions.values() for function in buckets]
    yield from dict.fromkeys(file for file in found if file is not None)


def problems(manifest: Manifest) -> Iterator[str]:
    """The contradictions between a manifest and its bundle files."""
    names = [pack.program for pack in manifest.packs]
    there = {program.name for program in manifest.programs}
    for name in names:
        if name is not None and name not in there:
            yield f"packs names program {name!r}, which the manifest does not have"
    if len(set(names)) < len(names):
        yield f"packs names a program twice: {names}"
