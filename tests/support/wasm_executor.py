"""Runs wasm artifacts in Node for tests: an executor that lays memory out as docs/wasm.md says."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nearfar.edge_runtime import Engine
from nearfar.edge_runtime.artifact.budget import longest, plan_pages
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.devices import Settings
from nearfar.edge_runtime.engine.core import EngineCore
from nearfar.edge_runtime.executors.planned import ProgramLayout, as_bytes
from nearfar.edge_runtime.openai.api import AsyncEngine
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.errors import DeviceError
from nearfar.format.manifest import Program
from nearfar.format.plans import Launch
from nearfar.format.sizes import WASM_RESERVED, WASM_STACK

Array = npt.NDArray[np.generic]
HOST = Path(__file__).with_name("wasm_host.mjs")
TENSOR = struct.Struct("<IiiiBBHIIxxxxQ")
ARGUMENT = struct.Struct("<iIQ")
LAUNCH = struct.Struct("<IIqIxxxxq")
CODES = {"i": 0, "u": 1, "f": 2}


def require_node() -> str:
    """The path of Node; skips the test where there is none."""
    return shutil.which("node") or pytest.skip("wasm: there is no node")


class Node:
    """A process of tests/support/wasm_host.mjs."""

    def __init__(self) -> None:
        command = [require_node(), str(HOST)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, op: str, body: bytes | memoryview = b"", **fields: Any) -> tuple[dict[str, Any], bytes]:
        """Send a message and wait for the answer. Raises DeviceError where the host reports a failure."""
        to, answers = self._process.stdin, self._process.stdout
        assert to is not None
        assert answers is not None
        header = json.dumps({"op": op, "bytes": len(body), **fields}).encode()
        to.write(struct.pack("<I", len(header)) + header)
        to.write(body)
        to.flush()
        (length,) = struct.unpack("<I", answers.read(4))
        answer = json.loads(answers.read(length))
        if "error" in answer:
            raise DeviceError(answer["error"])
        return answer, answers.read(answer["bytes"])

    def close(self) -> None:
        """End the process and its threads."""
        self._process.kill()
        self._process.communicate()


class Space:
    """Hands out addresses of a memory, from the lowest up."""

    def __init__(self) -> None:
        self.end = WASM_RESERVED

    def take(self, count: int, align: int = 64) -> int:
        """The address of `count` free bytes."""
        at = -(-self.end // align) * align
        self.end = at + count
        return at


class Tables:
    """Tensors, arguments and launches as bytes that are placed at `at`."""

    def __init__(self, at: int) -> None:
        self.at, self.content = at, bytearray()
        self.functions: list[tuple[int, str]] = []
        """For each launch, the offset in `content` of its function's address, and the name of its kernel."""
        self._tensors: dict[tuple[int, tuple[int, ...], str], int] = {}

    def plan(self, launches: Sequence[tuple[str, Sequence[int]]]) -> int:
        """Add the launches of kernels, each with its tensors; gives the address."""
        records = bytearray()
        for _, tensors in launches:
            arguments = self._put(b"".join(ARGUMENT.pack(7, 0, tensor) for tensor in tensors))
            records += LAUNCH.pack(0, arguments, len(tensors), 0, 0)
        start = self._put(records)
        places = range(start - self.at, start - self.at + len(records), LAUNCH.size)
        self.functions += [(place, kernel) for place, (kernel, _) in zip(places, launches, strict=True)]
        return start

    def tensor(self, data: int, extents: tuple[int, ...], dtype: str) -> int:
        """Add a tensor; gives the address."""
        key = (data, extents, dtype)
        if key not in self._tensors:
            kind = np.dtype(dtype)
            shape = self._put(struct.pack(f"<{len(extents)}q", *extents))
            code, bits = CODES[kind.kind], kind.itemsize * 8
            self._tensors[key] = self._put(TENSOR.pack(data, 1, 0, len(extents), code, bits, 1, shape, 0, 0))
        return self._tensors[key]

    def _put(self, content: bytes | bytearray) -> int:
        at = self.at + len(self.content)
        self.content += content + bytes(-len(content) % 8)
        return at


class WasmExecutor:
    """See Executor. It starts threads if the program is for shared memory."""

    name = "wasm"

    def __init__(self, artifact: Artifact, program: Program, settings: Settings) -> None:
        self.precision, self.program_name = program.precision, program.name
        self.node = Node()
        self._layout, self._kernels = ProgramLayout(artifact, program, settings), program.kernels
        space, weights = Space(), artifact.manifest.weights
        base = space.take(weights.bytes, 256)
        self._at = {f"weight:{tensor.name}": base + tensor.offset for tensor in weights.tensors}
        self._at |= {f"workspace:{i}": space.take(count) for i, count in enumerate(program.workspace)}
        for name, shape in self._layout.buffers.items():
            self._at[f"buffer:{name}"] = space.take(shape.nbytes)
        tops = [space.take(WASM_STACK, 16) + WASM_STACK for _ in range((settings.threads or 1) - 1)]
        tables = Tables(space.take(0))
        self.plans = {
            (function, bucket.size): self._bind(self._layout.launches(function, bucket.size), tables)
            for function, buckets in program.functions.items()
            for bucket in buckets
        }
        self._held = space.end + len(tables.content)
        self._open(artifact.path / str(program.library), "atomics" in program.requires.features, tables)
        stream = np.empty(weights.bytes, np.uint8)
        artifact.read_into(0, stream.data)
        self._write(base, stream)
        for name, table in self._layout.rope_tables():
            self.write(name, table)
        self.pool = self.node.ask("threads", tops=tops)[0]["pool"]

    def write(self, buffer: str, data: Array, row: int = 0, column: int = 0) -> None:
        """See Executor.write."""
        self._write(self._at[f"buffer:{buffer}"] + self._layout.place(buffer, data, row, column), data)

    def prepare(self, function: str, size: int, later: bool = False) -> Sequence[Future[Any]]:
        """See Executor.prepare. Node compiles when it opens the module."""
        return ()

    def run(self, function: str, size: int) -> None:
        """See Executor.run."""
        self.replay(*self.plans[function, size])

    def replay(self, launches: int, count: int) -> None:
        """Run launches. Raises DeviceError with the module's message where one fails."""
        failed = self.call("nf_replay", self.pool, launches, count)
        if failed != -1:
            said = self.text(self.call("nf_error")) or "a thread was lost"
            raise DeviceError(f"launch {failed} failed: {said}")

    def fetch(self, buffer: str, rows: int) -> Callable[[], Array]:
        """See Executor.fetch."""
        shape = self._layout.buffer(buffer)
        copy = self._read(buffer, 0, rows * shape.row_bytes).reshape(shape.rows(rows))
        return lambda: copy

    def copy_page(self, group: int, source: int, target: int) -> None:
        """See Executor.copy_page."""
        for name, shape in self._layout.caches(group).items():
            at, count = self._at[f"buffer:{name}"], shape.row_bytes
            self.node.ask("copy", at=at + source * count, to=at + target * count, count=count)

    def read_pages(self, group: int, pages: Sequence[int]) -> dict[str, Array]:
        """See Executor.read_pages."""
        return {
            name: np.stack([_swapped(name, self._page(name, page)) for page in pages])
            for name in self._layout.caches(group)
        }

    def write_pages(self, group: int, pages: Sequence[int], content: Mapping[str, Array]) -> None:
        """See Executor.write_pages."""
        for name, shape in self._layout.check_pages(group, pages, content).items():
            for page, values in zip(pages, content[name], strict=True):
                turned = values.swapaxes(1, 2) if name.endswith(".k") else values
                self._write(self._at[f"buffer:{name}"] + page * shape.row_bytes, turned)

    def memory_used(self) -> int:
        """See Executor.memory_used."""
        return self._held

    def close(self) -> None:
        """See Executor.close."""
        self.node.close()

    def call(self, name: str, *args: int) -> int:
        """Call an exported function."""
        return int(self.node.ask("call", name=name, args=list(args))[0].get("result", 0))

    def text(self, at: int) -> str:
        """The zero-terminated text at an address."""
        return self.node.ask("read", at=at, count=1024)[1].split(b"\0")[0].decode()

    def unpack(self, record: struct.Struct, at: int) -> tuple[int, ...]:
        """The fields of a record in memory."""
        return record.unpack(self.node.ask("read", at=at, count=record.size)[1])

    def _page(self, name: str, page: int) -> Array:
        shape = self._layout.buffer(name)
        return self._read(name, page * shape.row_bytes, shape.row_bytes).reshape(shape.extents[1:])

    def _read(self, buffer: str, start: int, count: int) -> Array:
        content = self.node.ask("read", at=self._at[f"buffer:{buffer}"] + start, count=count)[1]
        return np.frombuffer(content, self._layout.buffer(buffer).dtype)

    def _write(self, at: int, data: Array) -> None:
        self.node.ask("write", as_bytes(data).data, at=at)

    def _bind(self, launches: Sequence[Launch], tables: Tables) -> tuple[int, int]:
        """Address and number of the launches of a plan."""
        bound = [(each.kernel, self._arguments(each, tables)) for each in launches]
        return tables.plan(bound), len(bound)

    def _arguments(self, launch: Launch, tables: Tables) -> list[int]:
        params = self._kernels[launch.kernel].params
        shapes = [self._extents(arg, param.shape) for arg, param in zip(launch.args, params, strict=True)]
        given = zip(launch.args, shapes, params, strict=True)
        return [tables.tensor(self._at[arg], shape, param.dtype) for arg, shape, param in given]

    def _extents(self, arg: str, shape: Sequence[int | str]) -> tuple[int, ...]:
        """The shape of a buffer; it is the buffer's own, because layers of several groups share kernels."""
        space, _, name = arg.partition(":")
        return self._layout.buffer(name).extents if space == "buffer" else self._layout.extents(shape)

    def _open(self, file: Path, shared: bool, tables: Tables) -> None:
        """Make the memory and the first instance, and write the tables with the functions of the kernels."""
        answer, _ = self.node.ask("open", file=str(file), size=self._held, shared=shared)
        self.exports = {each["name"]: each["kind"] for each in answer["exports"]}
        names = sorted(self._kernels)
        content = self.node.ask("read", at=answer["kernels"], count=4 * (len(names) + 1))[1]
        *functions, end = struct.unpack(f"<{len(names) + 1}I", content)
        assert end == 0
        assert 0 not in functions
        index = dict(zip(names, functions, strict=True))
        for place, kernel in tables.functions:
            struct.pack_into("<I", tables.content, place, index[kernel])
        self.node.ask("write", bytes(tables.content), at=tables.at)


def _swapped(name: str, page: Array) -> Array:
    """A page in the shape of `read_pages`: in memory, keys have positions innermost."""
    heads, size, width = page.shape
    return page.reshape(heads, width, size).swapaxes(1, 2) if name.endswith(".k") else page


def open_wasm(
    path: Path, threads: int = 1, *, verify: bool = True, kv_dtype: str = "float16", kv_memory: str = "64MB"
) -> Engine:
    """Open an engine over a wasm artifact; with several threads it uses the program for shared memory."""
    artifact = Artifact.open(path)
    if verify:
        artifact.verify()
    manifest, shared = artifact.manifest, threads > 1
    fitting = (each for each in manifest.programs if ("atomics" in each.requires.features) == shared)
    program = next(each for each in fitting if each.kv_dtype == kv_dtype)
    pages = plan_pages(manifest, program, kv_memory)
    executor = WasmExecutor(artifact, program, Settings(pages, longest(manifest, pages), threads))
    core = EngineCore(executor, manifest, program, pages, pipelined=False)
    return Engine(AsyncEngine(core, TextCodec.open(artifact)))
