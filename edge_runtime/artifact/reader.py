"""Reads an artifact from disk: checks every byte of it, and reads its tensors and plans."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.edge_runtime.found import Found
from nearfar.edge_runtime.text.files import TOKENIZER_FILES
from nearfar.errors import ArtifactError, DeviceError, RequestError
from nearfar.format import bundle_files
from nearfar.format.kv import BITS, OF_TARGET
from nearfar.format.manifest import Function, Manifest, Program, Tensor
from nearfar.format.manifest_file import read
from nearfar.format.plans import Plan, parse_plan

_hashes: dict[tuple[str, int, int], str] = {}
"""SHA-256 of files that this process has read, by path, size and modification time."""


@dataclass(frozen=True)
class Expected:
    """A file that must exist; `bytes` and `sha256` are checked if they are known."""

    file: str
    bytes: int | None
    sha256: str | None


class Artifact:
    """A directory with a manifest, opened for reading."""

    def __init__(self, path: Path, manifest: Manifest, data: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self.data = data
        """The manifest as it was read, for display."""

    @classmethod
    def open(cls, path: str | Path) -> Artifact:
        """Read the manifest of an artifact directory."""
        root = Path(path)
        file = root / "manifest.json"
        if not file.is_file():
            raise ArtifactError(
                f"{root} is not an artifact: it has no manifest.json. Make one with nearfar build"
            )
        try:
            text = file.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArtifactError(f"{file} cannot be read ({error}). Copy the artifact again") from error
        return cls(root, *read(text, str(file)))

    def verify(self, told: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Check size and SHA-256 of every file, and the plans; ArtifactError names every file that is missing
        or wrong.

        `told` is called with bytes read and bytes in all.
        """
        files = list(self.files())
        done, total = 0, sum(expected.bytes or 0 for expected in files)
        problems = []
        with ThreadPoolExecutor(4) as pool:
            for expected, problem in zip(files, pool.map(self.problem, files), strict=True):
                done += expected.bytes or 0
                told(done, total)
                if problem:
                    problems.append(problem)
        problems += [f"{file} is not listed in manifest.json: remove it" for file in self._unlisted()]
        if problems:
            raise ArtifactError(
                f"artifact {self.path} is damaged: "
                + "; ".join(problems)
                + ". Copy it again, or build it again"
            )
        for bundle in self.manifest.packs:
            self._check_bundle_file(bundle.file)
        for program in self.manifest.programs:
            for buckets in program.functions.values():
                for function in buckets:
                    if function.plan is not None:
                        self.plan(function)

    def _check_bundle_file(self, name: str) -> None:
        """Check that a bundle file has the same contents as the files it names: browsers read it instead of
        them.
        """
        with self._open(name) as stream:
            found = bundle_files.unbundled(stream.read(), f"{name} of {self.path}")
        for file, content in found.items():
            if hashlib.sha256(content).hexdigest() != self.digest(file):
                raise ArtifactError(f"{name} of {self.path} holds another {file}. Build the artifact again")

    def able_programs(
        self,
        found: Found,
        precision: str | None = None,
        name: str | None = None,
        kv_bits: int | None = None,
    ) -> list[Program]:
        """The programs that a device can run, limited to a precision, a name or a cache of `kv_bits` bits.

        Without a name and `kv_bits`, only programs with the widest cache. DeviceError if the device can run
        none: it says what each program needs, what the device has, and what to do.
        """
        asked = self._programs(precision, name, kv_bits)
        able = [program for program in asked if not _lacking(program, found)]
        if able:
            return able
        others = [program.name for program in self.manifest.programs if not _lacking(program, found)]
        advice = f"it can run {', '.join(others)}" if others else found.advice
        raise DeviceError(
            f"this device cannot run {self.manifest.model.name} ({self.target}): "
            + "; ".join(f"{program.name} {_lacking(program, found)}" for program in asked)
            + f". The device {_has(found)}"
            + (f": {advice}" if advice else "")
        )

    def _programs(self, precision: str | None, name: str | None, kv_bits: int | None) -> Sequence[Program]:
        """The programs with the requested precision, name and bits of the cache; RequestError if there is
        none.
        """
        programs = self.manifest.programs
        kinds, named = [p.precision for p in programs], [p.name for p in programs]
        if precision is not None and precision not in kinds:
            there = ", ".join(dict.fromkeys(kinds))
            raise RequestError(f"the artifact has programs for {there}, not for {precision!r}", "precision")
        if name is not None and name not in named:
            raise RequestError(f"the artifact has the programs {', '.join(named)}, not {name!r}", "program")
        fit = [p for p in programs if precision in (None, p.precision) and name in (None, p.name)]
        if not fit:
            raise RequestError(
                f"the program {name!r} does not compute in {precision}: leave one of them out", "precision"
            )
        if kv_bits is not None:
            return self._of_kv_bits(fit, kv_bits)
        widest = max(_kv_rank(p) for p in fit)
        return fit if name is not None else [p for p in fit if _kv_rank(p) == widest]

    def _of_kv_bits(self, programs: Sequence[Program], bits: int) -> Sequence[Program]:
        """The programs with a cache of `bits` bits (16: floats of any size); RequestError if
        there is none.
        """
        if fit := [p for p in programs if _kv_rank(p) == bits]:
            return fit
        there = ", ".join(dict.fromkeys(p.kv_dtype for p in programs))
        target = self.target if self.target in OF_TARGET else next(iter(OF_TARGET))
        build = f", or build one: nearfar build --target {target} --kv-bits 16,{bits}"
        advice = build if bits in BITS.values() else ""
        raise RequestError(
            f"the artifact has no program with a KV cache of {bits} bits (kv_bits, --kv-bits), only of "
            f"{there}: leave it out{advice}",
            "kv_bits",
        )

    @property
    def target(self) -> str:
        return self.manifest.target

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the weight stream by name."""
        return {tensor.name: tensor for tensor in self.manifest.weights.tensors}

    def read_tensor(self, name: str) -> npt.NDArray[Any]:
        """Read a tensor from the shards that it spans, as an array of the tensor's dtype and shape."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ArtifactError(f"artifact {self.path} has no tensor {name}")
        data = bytearray(tensor.bytes)
        self.read_into(tensor.offset, memoryview(data))
        return np.frombuffer(data, np.dtype(tensor.dtype)).reshape(tensor.shape)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes of the weight stream from `offset`."""
        weights, done = self.manifest.weights, 0
        while done < len(target):
            index, start = divmod(offset + done, weights.shard_bytes)
            shard = weights.shards[index]
            count = min(len(target) - done, shard.bytes - start)
            with self._open(shard.file) as file:
                file.seek(start)
                found = file.readinto(target[done : done + count]) if count > 0 else 0
            if not found or found < count:
                raise ArtifactError(
                    f"{shard.file} of {self.path} is truncated: no {count} bytes at {start}. Copy the "
                    "artifact again, or build it again"
                )
            done += count

    def plan(self, function: Function) -> Plan:
        """Read the plan of one bucket; ArtifactError if it has none."""
        owners = (
            (p, name)
            for p in self.manifest.programs
            for name, buckets in p.functions.items()
            if function in buckets
        )
        program, name = next(owners, (None, ""))
        if function.plan is None or program is None:
            raise ArtifactError(f"artifact {self.path} for {self.target} has no such plan: {function}")
        return parse_plan(self.text(function.plan), name, function, program, self.manifest)

    def text(self, file: str) -> str:
        """Read a UTF-8 text file of the artifact."""
        with self._open(file) as stream:
            data = stream.read()
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ArtifactError(
                f"{file} of {self.path} is not UTF-8 ({error}). Copy the artifact again"
            ) from error

    def tokenizer_file(self, name: str) -> str | None:
        """The path inside the artifact of a tokenizer file, for example "tokenizer.json"; None if it has
        none.
        """
        files = (record.file for record in self.manifest.tokenizer.files)
        return next((file for file in files if PurePosixPath(file).name == name), None)

    def file(self, name: str) -> Path | None:
        """The path of an optional file, None if the artifact has none."""
        path = self.path / name
        return path if path.is_file() else None

    def digest(self, file: str) -> str:
        """SHA-256 of a file. A process reads a file once, until its size or modification time changes."""
        with self._open(file) as stream:
            stat = os.fstat(stream.fileno())
            key = (str((self.path / file).resolve()), stat.st_size, stat.st_mtime_ns)
            if key not in _hashes:
                _hashes[key] = hashlib.file_digest(stream, "sha256").hexdigest()
        return _hashes[key]

    def _open(self, file: str) -> BufferedReader:
        try:
            return (self.path / file).open("rb")
        except FileNotFoundError as error:
            raise ArtifactError(
                f"{file} is missing from {self.path}. Copy the artifact again or rebuild it"
            ) from error
        except OSError as error:
            raise ArtifactError(
                f"{file} of {self.path} cannot be read ({error}). Copy the artifact again"
            ) from error

    def _unlisted(self) -> list[str]:
        """Tokenizer files that are in the artifact's folder, but not in its manifest."""
        listed = {file.file for file in self.manifest.tokenizer.files}
        folders = {PurePosixPath(file).parent for file in listed}
        found = {
            str(folder / name)
            for folder in folders
            for name in TOKENIZER_FILES
            if (self.path / folder / name).exists()
        }
        return sorted(found - listed)

    def files(self) -> Iterator[Expected]:
        """Every file that the manifest lists."""
        own = [file for file in (self.manifest.config, self.manifest.function) if file is not None]
        manifest = self.manifest
        for file in (*manifest.weights.shards, *manifest.tokenizer.files, *manifest.packs, *own):
            yield Expected(file.file, file.bytes, file.sha256)
        for program in self.manifest.programs:
            if program.library is not None:
                yield Expected(program.library, None, program.library_sha256)
            if program.figures is not None:
                yield Expected(program.figures.file, program.figures.bytes, program.figures.sha256)
            for kernel in program.kernels.values():
                if kernel.file is not None:
                    yield Expected(kernel.file, None, kernel.sha256)
            for buckets in program.functions.values():
                for function in buckets:
                    if function.plan is not None:
                        yield Expected(function.plan, None, function.sha256)

    def problem(self, expected: Expected) -> str | None:
        """Describe what is wrong with a file; None if nothing is."""
        path = self.path / expected.file
        try:
            stat = path.stat()
        except FileNotFoundError:
            return f"{expected.file} is missing"
        except OSError as error:
            return f"{expected.file} cannot be read ({error})"
        if expected.bytes is not None and stat.st_size != expected.bytes:
            verb = "is truncated" if stat.st_size < expected.bytes else "is too long"
            return f"{expected.file} {verb}: {stat.st_size:,} of {expected.bytes:,} bytes"
        if expected.sha256 is None:
            return None
        found = self.digest(expected.file)
        if found != expected.sha256:
            return f"{expected.file} is corrupt: SHA-256 {found}, expected {expected.sha256}"
        return None


def _lacking(program: Program, found: Found) -> str:
    """Describe what a device lacks for a program; "" if the device can run it.

    No other rule decides this: native code that a processor cannot run would end the process.
    """
    needs = program.requires
    for needed, there in ((needs.arch, found.arch), (needs.system, found.system)):
        if needed is not None and there not in (None, needed):
            return f"is for {_platform(needs.arch, needs.system)}"
    missing = [f"feature {name}" for name in needs.features if name not in found.features]
    missing += [
        f"{name} {need} (has {found.limits[name]})"
        for name, need in needs.limits.items()
        if found.limits.get(name, need) < need
    ]
    return f"needs {', '.join(missing)}" if missing else ""


def _kv_rank(program: Program) -> int:
    """The rank of a program by its cache: the bits of a quantized cache, 16 for floats. Higher is better."""
    return BITS.get(program.kv_dtype, 16)


def _has(found: Found) -> str:
    """Describe the platform and the features of a device."""
    features = ", ".join(sorted(found.features)) or "no features"
    if found.arch is None and found.system is None:
        return f"has {features}"
    return f"is {_platform(found.arch, found.system)} and has {features}"


def _platform(arch: str | None, system: str | None) -> str:
    """The name of a platform, as --cpu takes it."""
    return f"{arch or 'any processor'}-{system or 'any system'}"
