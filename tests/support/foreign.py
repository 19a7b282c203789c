"""Runs CPU programs of another processor under qemu, through the runtime's own executor. The library runs in
a process of foreign_host.c that shares memory with the executor.
"""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from nearfar.edge_runtime import Engine
from nearfar.edge_runtime.artifact.budget import longest, plan_pages
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.devices import Settings
from nearfar.edge_runtime.engine.core import EngineCore
from nearfar.edge_runtime.executors.cpu import executor
from nearfar.edge_runtime.executors.cpu.library import DlTensor
from nearfar.edge_runtime.openai.api import AsyncEngine
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.errors import DeviceError
from nearfar.targets.cpu.link import zig
from nearfar.targets.cpu.platforms import PLATFORMS

SOURCE = Path(__file__).with_name("foreign_host.c")
PLATFORM = PLATFORMS["aarch64-linux"]
LIBC = Path("/usr/aarch64-linux-gnu")
TENSOR = struct.Struct("<QiiiBBHQQQ")
ARGUMENT = struct.Struct("<iIQ")
LAUNCH = struct.Struct("<QQqQq")


def require_emulator() -> str:
    """The path of qemu; skips the test where it or the libc for it is missing."""
    if not LIBC.is_dir():
        pytest.skip("aarch64: there is no libc for it (Debian: libc6-arm64-cross)")
    return shutil.which("qemu-aarch64") or pytest.skip(
        "aarch64: there is no qemu-aarch64 (Debian: qemu-user)"
    )


class Memory:
    """A file that both processes map; `take` hands out its bytes from the beginning to the end."""

    def __init__(self, file: Path, size: int) -> None:
        with file.open("wb") as out:
            out.truncate(size)
        with file.open("r+b") as both:
            self._bytes = np.frombuffer(mmap.mmap(both.fileno(), size), np.uint8)
        self.file, self.size, self._end = file, size, 0

    @property
    def address(self) -> int:
        """The address of the memory in this process."""
        return int(self._bytes.ctypes.data)

    def take(self, count: int, *, whole: bool = False) -> npt.NDArray[np.uint8]:
        """`count` zero bytes at a multiple of 64; `whole` as in host_memory.reserve, without effect."""
        start = self._end
        self._end += -(-count // 64) * 64
        assert self._end <= self.size, "a test that needs more memory asks for more"
        return self._bytes[start : start + count]

    def array(self, values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        """Copy an array into the memory."""
        held = self.take(values.nbytes).view(values.dtype).reshape(values.shape)
        held[...] = values
        return held


class Foreign:
    """Replaces library.Library, Plan and Pool: a library in the other process."""

    def __init__(self, path: Path, memory: Memory, cpu: str) -> None:
        folder = memory.file.parent
        if not (folder / "host").exists():
            shutil.copy(SOURCE, folder)
            zig(["cc", "-target", PLATFORM.zig, "-O1", "-rdynamic", "-o", "host", SOURCE.name], folder)
        command = [
            require_emulator(),
            "-cpu",
            cpu,
            "-L",
            LIBC,
            folder / "host",
            memory.file,
            str(memory.size),
            path,
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._memory = memory
        self._there = int(self._answer())

    def pool(self, threads: int, cores: int = 0) -> ForeignPool:
        """See Library.pool."""
        return ForeignPool(self, int(self.ask(f"pool {threads}")), threads)

    def bind(
        self, launches: Sequence[tuple[str, Sequence[DlTensor]]], weights: Sequence[DlTensor | None] = ()
    ) -> ForeignPlan:
        """See Library.bind."""
        records = b""
        read = weights or [None] * len(launches)
        for (name, tensors), matrix in zip(launches, read, strict=True):
            given = b"".join(ARGUMENT.pack(7, 0, self._tensor(tensor)) for tensor in tensors)
            streamed = (self._address(matrix.struct.data), matrix.nbytes) if matrix else (0, 0)
            function = int(self.ask(f"symbol __tvm_ffi_{name}"))
            assert function, name
            records += LAUNCH.pack(function, self._put(given), len(tensors), *streamed)
        return ForeignPlan(self._put(records), [name for name, _ in launches])

    def ask(self, command: str) -> str:
        """Send a command and wait for its answer."""
        to = self._process.stdin
        assert to is not None
        to.write(f"{command}\n")
        to.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> str:
        answers = self._process.stdout
        assert answers is not None
        line = answers.readline()
        assert line, f"the host ended with status {self._process.wait()}"
        return line

    def _tensor(self, tensor: DlTensor) -> int:
        record = tensor.struct
        shape = self._put(struct.pack(f"<{record.ndim}q", *record.shape[: record.ndim]))
        kind = (record.device_type, record.device_id, record.ndim, record.code, record.bits, record.lanes)
        return self._put(TENSOR.pack(self._address(record.data), *kind, shape, 0, 0))

    def _put(self, content: bytes) -> int:
        held = self._memory.array(np.frombuffer(content, np.uint8))
        return self._address(held.ctypes.data)

    def _address(self, here: int) -> int:
        return here - self._memory.address + self._there


class ForeignPlan(NamedTuple):
    """See library.LoadedPlan: the address of the launches in the other process, and the names of their
    kernels.
    """

    at: int
    names: list[str]


class ForeignPool:
    """See library.Pool."""

    def __init__(self, library: Foreign, handle: int, threads: int) -> None:
        self._library, self._handle, self.threads = library, handle, threads

    def replay(self, plan: ForeignPlan, first: int = 0, end: int | None = None) -> None:
        """See Pool.replay."""
        at, names = plan.at + first * LAUNCH.size, plan.names[first:end]
        failed, _, said = self._library.ask(f"replay {self._handle} {at} {len(names)}").partition(" ")
        if int(failed) >= 0:
            raise DeviceError(f"kernel {names[int(failed)]} refused its arguments: {said.strip()}")

    def close(self) -> None:
        """End the pool's threads, then the process. Waits in between, to notice a thread that does
        not end.
        """
        assert int(self._library.ask(f"free {self._handle}")) == 0
        self._library.close()


def open_foreign(
    path: Path, name: str, threads: int, folder: Path, cpu: str, monkeypatch: pytest.MonkeyPatch
) -> Engine:
    """Open an engine over the named program of a CPU artifact, under an emulator of the processor `cpu`."""
    artifact = Artifact.open(path)
    artifact.verify()
    manifest = artifact.manifest
    program = next(each for each in manifest.programs if each.name == name)
    pages = plan_pages(manifest, program, "8MB")
    memory = Memory(folder / f"{name}-{threads}", 1 << 28)
    monkeypatch.setattr(executor, "reserve", memory.take)
    monkeypatch.setattr(executor, "Library", lambda library: Foreign(library, memory, cpu))
    made = executor.CpuExecutor(artifact, program, Settings(pages, longest(manifest, pages), threads))
    core = EngineCore(made, manifest, program, pages, pipelined=False)
    return Engine(AsyncEngine(core, TextCodec.open(artifact)))
