"""Runs a WebGPU artifact through wgpu-py, which reaches Vulkan, Metal and Direct3D 12.

A run is one command encoder with one compute pass: WebGPU makes each dispatch's writes visible to the next.
Pipelines and bind groups are made at the first use of a bucket and kept, so a run only replays them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.edge_runtime.executors.planned import cache_names, check_pages, place, rope_table, symbols
from nearfar.edge_runtime.executors.webgpu.device import open_device, require_wgpu
from nearfar.errors import ArtifactError, DeviceError, DeviceLost, NearfarError

Array = npt.NDArray[np.generic]
MAX_GRID_X = 65535


@dataclass(frozen=True)
class Memory:
    """A buffer on the device and how the host sees it."""

    buffer: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (what the first axis counts)."""
        return int(np.prod(self.shape[1:], dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class Dispatch:
    """One launch, ready to record."""

    pipeline: Any
    group: Any
    grid: tuple[int, int, int]


class WebGpuExecutor:
    """See Executor. The queue keeps the order of writes, runs, copies and fetches; only a fetch's result waits."""

    name = "webgpu"

    def __init__(
        self,
        directory: Path | str,
        manifest: Mapping[str, Any],
        program: Mapping[str, Any],
        *,
        pages: Sequence[int],
        context: int,
    ) -> None:
        """Open a device, load the weights, make the buffers for so many pages by group and positions."""
        self._wgpu = require_wgpu()
        self.precision = {"float16": "f16", "float32": "f32"}[program["activations"]]
        self._root = Path(directory)
        self._program = program
        self._symbols = symbols(pages, context)
        self._groups = [int(cache["group"]) for cache in manifest["caches"]]
        self._closed = False
        self._held = 0
        shapes = {
            str(b["name"]): (
                self._shape(b["shape"]),
                np.dtype(program["kv_dtype"] if b["dtype"] == "kv" else b["dtype"]),
            )
            for b in manifest["buffers"]
        }
        largest = max(_bytes(*shape) for shape in shapes.values())
        self._device = open_device(
            program["requires"], largest, f"The cache of {sum(pages)} pages takes {largest:,} bytes a buffer"
        )
        self._memory: dict[str, Memory] = {}
        self._plans: dict[tuple[str, int], list[Dispatch]] = {}
        self._pipelines: dict[str, Any] = {}
        self._layouts: dict[tuple[str, ...], Any] = {}
        self._uniforms: dict[int, Any] = {}
        self._staging: dict[int, list[Any]] = {}
        try:
            with self._guard(f"loading weights and a cache of {sum(pages)} pages"):
                self._load_weights(manifest["weights"])
                for i, count in enumerate(program["workspace"]):
                    self._reserve(f"workspace:{i}", (int(count),), np.dtype("uint8"))
                for name, (shape, dtype) in shapes.items():
                    self._reserve(f"buffer:{name}", shape, dtype)
                caches = [cache for group in range(len(pages)) for cache in self._caches(group).values()]
                self._page = self._create(max((cache.row_bytes for cache in caches), default=4))
                for name, rope in manifest["ropes"].items():
                    frequencies = self._read_weight(manifest["weights"], rope["inv_freq"])
                    self.write(f"rope.{name}", rope_table(frequencies, float(rope["scale"]), context))
        except BaseException:
            self.close()
            raise

    def write(self, buffer: str, data: Array, row: int = 0, column: int = 0) -> None:
        """See Executor.write."""
        memory = self._buffer(buffer)
        start = place(buffer, memory.shape, memory.dtype, data, row, column)
        if data.size:
            with self._guard(f"writing {buffer}"):
                content = np.ascontiguousarray(data)
                self._device.queue.write_buffer(memory.buffer, start * memory.dtype.itemsize, content)

    def run(self, function: str, size: int) -> None:
        """See Executor.run."""
        with self._guard(f"running {function} of size {size}"):
            plan = self._plans.get((function, size)) or self._prepare(function, size)
            encoder = self._device.create_command_encoder()
            compute = encoder.begin_compute_pass()
            for dispatch in plan:
                compute.set_pipeline(dispatch.pipeline)
                compute.set_bind_group(0, dispatch.group)
                compute.dispatch_workgroups(*dispatch.grid)
            compute.end()
            self._submit(encoder)

    def fetch(self, buffer: str, rows: int) -> Callable[[], Array]:
        """See Executor.fetch."""
        memory = self._buffer(buffer)
        rows = min(rows, memory.shape[0])
        count = rows * memory.row_bytes
        padded = -(-count // 4) * 4
        pool = self._staging.setdefault(padded, [])
        with self._guard(f"fetching {buffer}"):
            staging = pool.pop() if pool else self._create_staging(padded)
            encoder = self._device.create_command_encoder()
            encoder.copy_buffer_to_buffer(memory.buffer, 0, staging, 0, padded)
            self._submit(encoder)

        def wait() -> Array:
            with self._guard(f"waiting for {buffer}"):
                data = self._mapped(staging, count).view(memory.dtype).reshape(rows, *memory.shape[1:])
            pool.append(staging)
            return data

        return wait

    def copy_page(self, group: int, source: int, target: int) -> None:
        """See Executor.copy_page. Through a buffer between, since WebGPU copies no buffer onto itself."""
        with self._guard("copying a page"):
            encoder = self._device.create_command_encoder()
            for cache in self._caches(group).values():
                count = cache.row_bytes
                encoder.copy_buffer_to_buffer(cache.buffer, source * count, self._page, 0, count)
                encoder.copy_buffer_to_buffer(self._page, 0, cache.buffer, target * count, count)
            self._submit(encoder)

    def read_pages(self, group: int, pages: Sequence[int]) -> dict[str, Array]:
        """See Executor.read_pages."""
        content: dict[str, Array] = {}
        for name, cache in self._caches(group).items():
            with self._guard("reading pages"):
                content[name] = self._read_cache(cache, pages)
        return content

    def write_pages(self, group: int, pages: Sequence[int], content: Mapping[str, Array]) -> None:
        """See Executor.write_pages."""
        caches = self._caches(group)
        check_pages(content, {name: ((len(pages), *cache.shape[1:]), cache.dtype) for name, cache in caches.items()})
        with self._guard("writing pages"):
            for name, cache in caches.items():
                for page, data in zip(pages, content[name], strict=True):
                    self._device.queue.write_buffer(cache.buffer, page * cache.row_bytes, np.ascontiguousarray(data))

    def memory_used(self) -> int:
        """See Executor.memory_used."""
        return self._held

    def close(self) -> None:
        """See Executor.close."""
        if self._closed:
            return
        self._closed = True
        for memory in self._memory.values():
            memory.buffer.destroy()
        for buffer in [*self._uniforms.values(), *(b for pool in self._staging.values() for b in pool)]:
            buffer.destroy()
        self._memory.clear()
        self._plans.clear()
        self._pipelines.clear()
        self._staging.clear()
        self._held = 0
        self._device.destroy()

    @contextmanager
    def _guard(self, doing: str) -> Iterator[None]:
        """Turn what wgpu raises into our errors: DeviceLost where the device is gone, so that the engine opens it anew."""
        try:
            yield
        except NearfarError:
            raise
        except Exception as error:
            if self._is_lost(error):
                raise DeviceLost(
                    f"the WebGPU device was lost while {doing}: the driver reset it, after a fault or because a step took too "
                    "long. If it happens again, update the driver, or choose another device (nearfar devices lists them)"
                ) from error
            if isinstance(error, self._wgpu.GPUOutOfMemoryError):
                raise DeviceError(
                    f"the WebGPU device has no room while {doing}, with {self._held:,} bytes held. Give the cache less "
                    "(--kv-memory), close other programs that use the device, or take a smaller model"
                ) from error
            raise DeviceError(f"the WebGPU device failed while {doing}: {type(error).__name__}: {error}") from error

    def _is_lost(self, error: Exception) -> bool:
        """Whether the device is gone. wgpu-py (0.32) has no error class and no `device.lost` for that, only wgpu-native's words."""
        if not isinstance(error, self._wgpu.GPUError | RuntimeError):
            return False
        try:
            self._device.create_command_encoder().finish()
        except Exception as found:
            return "lost" in str(found)
        return "device is lost" in str(error)

    def _submit(self, encoder: Any) -> None:
        self._device.queue.submit([encoder.finish()])

    def _create_staging(self, count: int) -> Any:
        usage = self._wgpu.BufferUsage
        return self._create(count, usage.MAP_READ | usage.COPY_DST)

    def _mapped(self, staging: Any, count: int) -> npt.NDArray[np.uint8]:
        """Wait for the first `count` bytes of a staging buffer, and copy them."""
        staging.map_sync(self._wgpu.MapMode.READ)
        data = np.frombuffer(staging.read_mapped(), np.uint8)[:count].copy()
        staging.unmap()
        return data

    def _destroy(self, buffer: Any) -> None:
        self._held -= buffer.size
        buffer.destroy()

    def _read_cache(self, cache: Memory, pages: Sequence[int]) -> Array:
        """Copies of pages of keys or values, [len(pages), kv_heads, page_size, head_dim]."""
        count = cache.row_bytes
        staging = self._create_staging(count * len(pages))
        encoder = self._device.create_command_encoder()
        for index, page in enumerate(pages):
            encoder.copy_buffer_to_buffer(cache.buffer, page * count, staging, index * count, count)
        self._submit(encoder)
        raw = self._mapped(staging, count * len(pages))
        self._destroy(staging)
        return raw.view(cache.dtype).reshape(len(pages), *cache.shape[1:])

    def _caches(self, group: int) -> dict[str, Memory]:
        """Keys and values of a group."""
        return {name: self._buffer(name) for name in cache_names(self._groups, group)}

    def _buffer(self, name: str) -> Memory:
        try:
            return self._memory[f"buffer:{name}"]
        except KeyError:
            raise ArtifactError(f"the artifact has no buffer {name!r}") from None

    def _shape(self, shape: list[int | str]) -> tuple[int, ...]:
        return tuple(self._symbols[extent] if isinstance(extent, str) else int(extent) for extent in shape)

    def _create(self, count: int, usage: int | None = None) -> Any:
        flags = self._wgpu.BufferUsage
        count = max(-(-count // 4) * 4, 4)
        self._held += count
        return self._device.create_buffer(size=count, usage=usage or flags.STORAGE | flags.COPY_SRC | flags.COPY_DST)

    def _reserve(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Memory:
        memory = self._memory[name] = Memory(self._create(_bytes(shape, dtype)), shape, dtype)
        return memory

    def _load_weights(self, weights: Mapping[str, Any]) -> None:
        """A buffer a tensor, filled from the shards in pieces: the stream never lies in host memory as a whole."""
        for record in weights["tensors"]:
            memory = self._reserve(f"weight:{record['name']}", tuple(record["shape"]), np.dtype(record["dtype"]))
            at = 0
            for piece in _pieces(self._root, weights, int(record["offset"]), int(record["bytes"])):
                self._device.queue.write_buffer(memory.buffer, at, piece)
                at += len(piece)

    def _read_weight(self, weights: Mapping[str, Any], name: str) -> Array:
        record = next(r for r in weights["tensors"] if r["name"] == name)
        pieces = list(_pieces(self._root, weights, int(record["offset"]), int(record["bytes"])))
        return np.frombuffer(b"".join(p.tobytes() for p in pieces), record["dtype"]).reshape(record["shape"])

    def _prepare(self, function: str, size: int) -> list[Dispatch]:
        """Pipelines and bind groups of one bucket."""
        entries = self._program["functions"].get(function, ())
        entry = next((e for e in entries if int(e["size"]) == size), None)
        if entry is None:
            raise ArtifactError(f"the artifact has no plan for {function} of size {size}")
        launches = json.loads((self._root / entry["plan"]).read_text(encoding="utf-8"))["launches"]
        plan = self._plans[function, size] = [self._dispatch(launch) for launch in launches]
        return plan

    def _dispatch(self, launch: Mapping[str, Any]) -> Dispatch:
        kernel = self._program["kernels"][launch["kernel"]]
        x, y, z = (int(extent) for extent in launch["grid"])
        buffers = [self._argument(arg) for arg in launch["args"]]
        bindings = [*buffers, self._uniform(x - 1)]
        group = self._device.create_bind_group(
            layout=self._layout(tuple(kernel["access"])),
            entries=[
                {"binding": i, "resource": {"buffer": b, "offset": 0, "size": b.size}} for i, b in enumerate(bindings)
            ],
        )
        grid = (x, y, z) if x <= MAX_GRID_X else (MAX_GRID_X, y, -(-x // MAX_GRID_X))
        return Dispatch(self._pipeline(launch["kernel"], kernel), group, grid)

    def _argument(self, arg: str) -> Any:
        if arg not in self._memory:
            raise ArtifactError(f"a plan names {arg!r}, which the manifest does not have")
        return self._memory[arg].buffer

    def _uniform(self, value: int) -> Any:
        """The buffer with packGridDimX; kernels with equal grids share it."""
        if value not in self._uniforms:
            usage = self._wgpu.BufferUsage.UNIFORM
            self._uniforms[value] = self._device.create_buffer_with_data(data=np.array([value], np.uint32), usage=usage)
        return self._uniforms[value]

    def _layout(self, access: tuple[str, ...]) -> Any:
        if access not in self._layouts:
            kinds = [{"read": "read-only-storage", "read_write": "storage"}[a] for a in access] + ["uniform"]
            stage = self._wgpu.ShaderStage.COMPUTE
            entries = [{"binding": i, "visibility": stage, "buffer": {"type": kind}} for i, kind in enumerate(kinds)]
            self._layouts[access] = self._device.create_bind_group_layout(entries=entries)
        return self._layouts[access]

    def _pipeline(self, name: str, kernel: Mapping[str, Any]) -> Any:
        if name not in self._pipelines:
            layout = self._device.create_pipeline_layout(bind_group_layouts=[self._layout(tuple(kernel["access"]))])
            with self._guard(f"compiling kernel {name}"):
                module = self._device.create_shader_module(
                    code=(self._root / kernel["file"]).read_text(encoding="utf-8")
                )
                self._pipelines[name] = self._device.create_compute_pipeline(
                    layout=layout, compute={"module": module, "entry_point": kernel["entry"]}
                )
        return self._pipelines[name]


def _bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def _pieces(root: Path, weights: Mapping[str, Any], offset: int, count: int) -> list[npt.NDArray[np.uint8]]:
    """Bytes offset … offset+count of the weight stream as views into the mapped shards."""
    size = int(weights["shard_bytes"])
    out: list[npt.NDArray[np.uint8]] = []
    while count > 0:
        index, start = divmod(offset, size)
        shard = root / weights["shards"][index]["file"]
        if not shard.is_file() or shard.stat().st_size <= start:
            raise ArtifactError(f"{shard} is truncated or missing: copy or build the artifact again")
        piece = np.memmap(shard, np.uint8, "r")[start : start + count]
        out.append(piece)
        offset, count = offset + len(piece), count - len(piece)
    return out
