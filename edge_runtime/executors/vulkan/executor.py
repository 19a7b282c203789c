"""Runs a Vulkan artifact: one command buffer for each plan, recorded at its first use and submitted at every
use.

Nothing is submitted before a `fetch` or another call that waits: a step's writes, its plans and the copy of
its results are one vkQueueSubmit. If the device is idle, writes go straight to mapped memory. Otherwise they
go through a ring, in a command buffer of their own between the plans, so that they never overtake a step that
still reads the old values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.devices import Settings
from nearfar.edge_runtime.executors.compiling import unfinished
from nearfar.edge_runtime.executors.planned import BufferShape, ProgramLayout, as_bytes, pieces
from nearfar.edge_runtime.executors.vulkan.blocks import Memory, Region, Ring
from nearfar.edge_runtime.executors.vulkan.commands import Queue
from nearfar.edge_runtime.executors.vulkan.device import LogicalDevice, gpus, open_device, select
from nearfar.edge_runtime.executors.vulkan.pipelines import Pipelines
from nearfar.edge_runtime.executors.vulkan.timestamps import Timestamps
from nearfar.errors import DeviceError, OutOfMemory
from nearfar.format.manifest import Program

Array = npt.NDArray[np.generic]
Bytes = npt.NDArray[np.uint8]

RING_BYTES = 8 << 20
SMALL_BYTES = 1 << 20
"""Bytes up to which a buffer is placed with the state of each step; larger ones are placed with the cache."""
READBACK_BYTES = 1 << 20


@dataclass(frozen=True)
class _Landing:
    """Mapped memory that a fetch copies to, and the command buffer that copies."""

    commands: Any
    content: Bytes


class VulkanExecutor:
    """See Executor."""

    name = "vulkan"

    def __init__(
        self,
        artifact: Artifact,
        program: Program,
        settings: Settings,
        *,
        direct: bool = True,
        beside: VulkanExecutor | None = None,
    ) -> None:
        """Open a device, load the weights, and allocate the buffers for the settings' pages and positions.

        `direct`: False treats all device memory as not mapped, as on a GPU without a mapped window. `beside`:
        share the device and the weights of another executor of the artifact, which is closed after this one.
        """
        self.precision, self.program_name = program.precision, program.name
        self.gpu = select(settings.which, gpus(settings.debug))
        self._artifact = artifact
        self._program = program
        self._layout = ProgramLayout(artifact, program, settings)
        self._plans: dict[tuple[str, int], Any] = {}
        self._regions: dict[str, Region] = {}
        self._landings: dict[tuple[str, int], list[_Landing]] = {}
        self._readback: tuple[Region, int] | None = (
            None  # the buffer from which landings are cut, and the number of used bytes
        )
        self._pages_back: Region | None = None
        self._open: Any = None
        self._touched: set[str] = set()
        self._parts: list[Any] = []  # objects to close, in the order in which they were made
        self._beside = beside
        self._device: LogicalDevice = beside._device if beside else open_device(self.gpu, program.requires)
        if beside is None:
            self._parts.append(self._device)
        try:
            self._prepare(direct)
        except BaseException:
            self.close()
            raise

    def _prepare(self, direct: bool) -> None:
        self._take_memory(direct)
        self._parts.append(self._memory)
        self._pipelines = Pipelines(self._device, self._artifact, self._program, self._regions)
        self._parts.append(self._pipelines)
        self._queue = Queue(self._device)
        self._parts.append(self._queue)  # The queue is closed first, because closing it waits for the device.
        (ring,) = self._memory.reserve([RING_BYTES], self._memory.kinds.upload, True)
        self._ring = Ring(ring, self._submit, self._queue.wait)
        self._clear()
        # The smallest step is compiled while the weights are uploaded.
        self.prepare("step", self._layout.smallest("step"), later=True)
        if self._beside is None:
            self._load_weights()
        for name, table in self._layout.rope_tables():
            self.write(name, table)
        self._queue.wait(self._submit())

    def write(self, buffer: str, data: Array, row: int = 0, column: int = 0) -> None:
        """See Executor.write."""
        at = self._layout.place(buffer, data, row, column)
        if data.size:
            self._put(buffer, self._region(buffer), at, as_bytes(data))

    def prepare(self, function: str, size: int, later: bool = False) -> Sequence[Future[Any]]:
        """See Executor.prepare."""
        if later and self.gpu.kind == "cpu":
            return ()
        return unfinished(self._pipelines.begin(self._layout.launches(function, size), later))

    def run(self, function: str, size: int) -> None:
        """See Executor.run."""
        plan = self._plans.get((function, size)) or self._record(function, size)
        self._end_transfers()
        self._queue.add(plan)

    def profile(self, function: str, size: int) -> tuple[float, ...]:
        """See planned.Profiled. A command buffer for one use is recorded with timestamps."""
        launches = self._pipelines.prepare(self._layout.launches(function, size))
        self._end_transfers()
        with Timestamps(self._device, len(launches)) as stamps:
            commands = self._queue.once()
            stamps.begin(commands)
            self._queue.record(commands, launches, stamps.stamp)
            self._queue.add_once(commands)
            self._queue.wait(self._submit())
            return stamps.seconds()

    def fetch(self, buffer: str, rows: int) -> Callable[[], Array]:
        """See Executor.fetch. Submits all enqueued work."""
        shape = self._layout.buffer(buffer)
        rows = min(rows, shape.extents[0])
        # Row counts are rounded up to powers of two, so that few command buffers are recorded.
        room = min(1 << max(rows - 1, 0).bit_length(), shape.extents[0])
        pool = self._landings.setdefault((buffer, room), [])
        landing = pool.pop() if pool else self._make_landing(self._region(buffer), room * shape.row_bytes)
        self._end_transfers()
        self._queue.add(landing.commands)
        value = self._submit()

        @functools.cache  # the landing serves another fetch once it has been read
        def wait() -> Array:
            self._queue.wait(value)
            data = (
                landing.content[: rows * shape.row_bytes].copy().view(shape.dtype).reshape(shape.rows(rows))
            )
            pool.append(landing)
            return data

        return wait

    def copy_page(self, group: int, source: int, target: int) -> None:
        """See Executor.copy_page."""
        caches = self._layout.caches(group)
        commands = self._transfers(*(f"{name}:{page}" for name in caches for page in (source, target)))
        for name, cache in caches.items():
            region, count = self._region(name), cache.row_bytes
            start, end = region.offset + source * count, region.offset + target * count
            self._queue.copy(commands, (region.buffer, start), (region.buffer, end), count)

    def read_pages(self, group: int, pages: Sequence[int]) -> dict[str, Array]:
        """See Executor.read_pages."""
        self._queue.to_host(self._transfers())
        self._queue.wait(self._submit())
        content: dict[str, Array] = {}
        for name, cache in self._layout.caches(group).items():
            raw = np.empty((len(pages), cache.row_bytes), np.uint8)
            for index, page in enumerate(pages):
                self._get(self._region(name), page * cache.row_bytes, raw[index])
            content[name] = raw.reshape(-1).view(cache.dtype).reshape(cache.rows(len(pages)))
        return self._layout.told(content)

    def write_pages(self, group: int, pages: Sequence[int], content: Mapping[str, Array]) -> None:
        """See Executor.write_pages."""
        held = self._layout.held(group, pages, content)
        for name, cache in self._layout.caches(group).items():
            for page, data in zip(pages, held[name], strict=True):
                self._put(f"{name}:{page}", self._region(name), page * cache.row_bytes, as_bytes(data))

    def memory_used(self) -> int:
        """See Executor.memory_used."""
        return self._memory.held if self._parts else 0

    def close(self) -> None:
        """See Executor.close."""
        while self._parts:
            self._parts.pop().close()
        self._plans.clear()
        self._landings.clear()
        self._regions.clear()

    @property
    def waited(self) -> float:
        """Seconds spent waiting for the device so far."""
        return self._queue.waited

    def _take_memory(self, direct: bool) -> None:
        """Allocate memory for everything that plans name; without mapping it if less can be mapped than is
        needed.

        A driver may map less than the whole heap of its memory types: for an H100 with 85 GB in a virtual
        machine about 42 GB.
        """
        self._memory = Memory(self._device, direct)
        try:
            self._place()
        except OutOfMemory:
            mapped = self._memory.kinds.large_mapped
            self._memory.close()
            if not mapped:
                raise
            self._take_memory(direct=False)
        except BaseException:
            self._memory.close()
            raise

    def _place(self) -> None:
        """Allocate regions for all names in plans: weights, workspace and cache in large blocks, state in
        mapped memory.
        """
        kinds = self._memory.kinds
        weights = {
            f"weight:{tensor.name}": tensor.bytes for tensor in self._artifact.manifest.weights.tensors
        }
        if self._beside is not None:
            self._regions.update({name: self._beside._regions[name] for name in weights})
        large = {} if self._beside else weights
        large |= {f"workspace:{i}": count for i, count in enumerate(self._program.workspace)}
        buffers = {f"buffer:{name}": shape for name, shape in self._layout.buffers.items()}
        small = {name: shape.nbytes for name, shape in buffers.items() if self._is_state(name, shape)}
        large |= {name: shape.nbytes for name, shape in buffers.items() if name not in small}
        most = self.gpu.limits["maxStorageBufferRange"]
        for name, size in (large | small).items():
            if size > most:
                what = "give the cache less (--kv-memory)" if name in buffers else "take a smaller model"
                raise DeviceError(
                    f"{self.gpu.name} reaches {most:,} bytes of a buffer, and {name} has {size:,}: {what}"
                )
        regions = self._memory.reserve(list(small.values()), kinds.small, kinds.small_mapped)
        regions += self._memory.reserve(list(large.values()), kinds.large, kinds.large_mapped)
        self._regions.update(zip((*small, *large), regions, strict=True))

    def _is_state(self, name: str, shape: BufferShape) -> bool:
        return shape.nbytes <= SMALL_BYTES and not name.startswith("buffer:kv.")

    def _clear(self) -> None:
        """Zero everything except the weights."""
        commands = self._queue.once()
        for name, region in self._regions.items():
            if not name.startswith("weight:"):
                self._queue.fill(commands, region.buffer, region.offset, region.bound)
        self._queue.add_once(commands)
        self._queue.wait(self._submit())

    def _load_weights(self) -> None:
        """Upload the weights: directly to mapped memory, else in pieces through the ring."""
        for tensor in self._artifact.manifest.weights.tensors:
            region = self._regions[f"weight:{tensor.name}"]
            if region.mapped is not None:
                self._artifact.read_into(tensor.offset, region.mapped[: tensor.bytes].data)
                continue
            for start, piece in pieces(self._artifact, tensor, self._ring.most):
                self._put(f"weight:{tensor.name}:{start}", region, start, piece)

    def _record(self, function: str, size: int) -> Any:
        """Record the command buffer of a plan."""
        launches = self._pipelines.prepare(self._layout.launches(function, size))
        commands = self._queue.kept()
        self._queue.record(commands, launches)
        self._queue.end(commands)
        self._plans[function, size] = commands
        return commands

    def _make_landing(self, source: Region, size: int) -> _Landing:
        size = max(size, 1)
        if self._readback is None or self._readback[1] + size > self._readback[0].size:
            self._readback = (self._reserve_readback(max(size, READBACK_BYTES)), 0)
        region, used = self._readback
        self._readback = (region, -(-(used + size) // 64) * 64)
        commands = self._queue.kept()
        self._queue.copy(
            commands, (source.buffer, source.offset), (region.buffer, region.offset + used), size
        )
        self._queue.to_host(commands)
        self._queue.end(commands)
        assert region.mapped is not None
        return _Landing(commands, region.mapped[used : used + size])

    def _put(self, name: str, region: Region, at: int, data: Bytes) -> None:
        """Write bytes of a region after all enqueued work. `name` identifies the buffer or page
        for barriers.
        """
        if region.mapped is not None and self._open is None and self._queue.idle:
            region.mapped[at : at + data.size] = data
            return
        for start in range(0, data.size, self._ring.most):
            part = data[start : start + self._ring.most]
            offset = self._ring.put(part, self._queue.next)
            self._queue.copy(
                self._transfers(name),
                (self._ring.region.buffer, offset),
                (region.buffer, region.offset + at + start),
                part.size,
            )

    def _get(self, region: Region, at: int, target: Bytes) -> None:
        """Read bytes of a region into `target`; the device must be idle."""
        if region.mapped is not None and self._memory.kinds.readable:
            target[:] = region.mapped[at : at + target.size]
            return
        if self._pages_back is None:
            self._pages_back = self._reserve_readback(READBACK_BYTES)
        back = self._pages_back
        assert back.mapped is not None
        for start in range(0, target.size, READBACK_BYTES):
            count = min(READBACK_BYTES, target.size - start)
            commands = self._queue.once()
            self._queue.copy(
                commands, (region.buffer, region.offset + at + start), (back.buffer, back.offset), count
            )
            self._queue.to_host(commands)
            self._queue.add_once(commands)
            self._queue.wait(self._submit())
            target[start : start + count] = back.mapped[:count]

    def _reserve_readback(self, size: int) -> Region:
        (region,) = self._memory.reserve([size], self._memory.kinds.readback, True)
        return region

    def _transfers(self, *names: str) -> Any:
        """The command buffer of copies since the last plan, with a barrier if one of `names` was written in
        it.
        """
        if self._open is None:
            self._open = self._queue.once()
            self._touched.clear()
        elif not self._touched.isdisjoint(names):
            self._queue.barrier(self._open)
            self._touched.clear()
        self._touched.update(names)
        return self._open

    def _end_transfers(self) -> None:
        if self._open is not None:
            self._queue.add_once(self._open)
            self._open = None

    def _submit(self) -> int:
        self._end_transfers()
        return self._queue.submit()

    def _region(self, buffer: str) -> Region:
        return self._regions[f"buffer:{buffer}"]
