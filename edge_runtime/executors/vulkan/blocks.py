"""Device memory: memory types by use, large blocks that are cut into regions, and a mapped ring
for uploads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.edge_runtime.executors.vulkan.binding import guard, require_vulkan
from nearfar.edge_runtime.executors.vulkan.device import LogicalDevice, MemoryType
from nearfar.errors import DeviceError

Bytes = npt.NDArray[np.uint8]

ALIGNMENT = 256
"""Regions start at multiples of this: no device may ask for more (minStorageBufferOffsetAlignment)."""

BLOCK_BYTES = 1 << 30
"""Bytes of one allocation, unless a region is larger.

Every device allows this size, but some allow only 4,096 allocations.
"""


@dataclass(frozen=True)
class Kinds:
    """Memory types by use: weights and cache, state of each step, uploads to the device, and readback.

    `large_mapped`, `small_mapped`: the host writes them directly. `readable`: the host can also read the
    large ones at full speed.
    """

    large: int
    small: int
    upload: int
    readback: int
    large_mapped: bool
    small_mapped: bool
    readable: bool


@dataclass(frozen=True)
class Region:
    """A part of a block: an aligned range of one of its buffers, and the same bytes mapped on the host, if
    they are.
    """

    buffer: Any
    offset: int
    size: int
    mapped: Bytes | None

    @property
    def bound(self) -> int:
        """Bytes that kernels see: the size rounded up to whole words."""
        return max(-(-self.size // 4) * 4, 4)


@dataclass(frozen=True)
class _Block:
    buffer: Any
    memory: Any
    size: int
    mapped: Bytes | None


def choose_kinds(types: Sequence[MemoryType], allowed: int, direct: bool = True) -> Kinds:
    """Choose the memory types to use, among those whose bit is set in `allowed`.

    If all of the device's memory is mapped (integrated GPUs, resizable BAR, lavapipe), nothing is staged. If
    only a window of it is mapped, the state of each step goes there. `direct`: False stages everything, as on
    a GPU without mapped memory.
    """
    usable = {index: kind for index, kind in enumerate(types) if allowed >> index & 1}
    host = [i for i, t in usable.items() if t.mapped and t.coherent]
    local = [i for i, t in usable.items() if t.local] or list(usable)
    largest = max(usable[i].heap_bytes for i in local)
    whole = [i for i in local if usable[i].heap_bytes == largest]
    open_whole = sorted((i for i in whole if i in host and direct), key=lambda i: not usable[i].cached)
    large = open_whole[0] if open_whole else whole[0]
    window = [i for i in local if i in host and direct]
    small = large if open_whole or not window else window[0]
    upload = min(host, key=lambda i: (usable[i].local, usable[i].cached))
    readback = min(host, key=lambda i: (not usable[i].cached, usable[i].local))
    return Kinds(
        large,
        small,
        upload,
        readback,
        bool(open_whole),
        small in host and direct,
        bool(open_whole) and usable[large].cached,
    )


class Memory:
    """All memory of one executor, allocated in blocks and freed together."""

    def __init__(self, device: LogicalDevice, direct: bool = True) -> None:
        self._vk = require_vulkan()
        self._device = device
        self._blocks: list[_Block] = []
        with guard(device.gpu.name, "measuring its memory"):
            probe = self._create_buffer(ALIGNMENT)
            allowed = int(self._vk.vkGetBufferMemoryRequirements(device.handle, probe).memoryTypeBits)
            self._vk.vkDestroyBuffer(device.handle, probe, None)
        self.kinds = choose_kinds(device.gpu.memory_types, allowed, direct)

    @property
    def held(self) -> int:
        """Bytes of device memory in use."""
        return sum(block.size for block in self._blocks)

    def reserve(self, sizes: Sequence[int], kind: int, mapped: bool) -> list[Region]:
        """Allocate regions of these sizes in as few blocks as possible; their contents are undefined.

        DeviceError if memory does not suffice.
        """
        limit = min(BLOCK_BYTES, self._device.gpu.limits["maxMemoryAllocationSize"])
        out: list[Region] = []
        group: list[tuple[int, int]] = []  # offset and size of each piece
        end = 0
        for size in sizes:
            room = max(-(-size // ALIGNMENT) * ALIGNMENT, ALIGNMENT)
            if group and end + room > limit:
                out += self._block(group, end, kind, mapped)
                group, end = [], 0
            group.append((end, size))
            end += room
        return [*out, *self._block(group, end, kind, mapped)] if group else out

    def close(self) -> None:
        """Free all blocks; the device must be idle."""
        for block in self._blocks:
            self._vk.vkDestroyBuffer(self._device.handle, block.buffer, None)
            self._vk.vkFreeMemory(self._device.handle, block.memory, None)  # freeing the memory unmaps it
        self._blocks.clear()

    def _block(self, group: Sequence[tuple[int, int]], size: int, kind: int, mapped: bool) -> list[Region]:
        vk, device, gpu = self._vk, self._device.handle, self._device.gpu
        most = gpu.limits["maxMemoryAllocationSize"]
        if size > most:
            raise DeviceError(
                f"{gpu.name} allocates at most {most:,} bytes at once, and a buffer of the cache or the "
                f"weights needs {size:,}: give the cache less (--kv-memory), or take a smaller model"
            )
        with guard(gpu.name, f"reserving {size:,} bytes", self.held):
            buffer = self._create_buffer(size)
            try:
                needed = int(vk.vkGetBufferMemoryRequirements(device, buffer).size)
                memory = vk.vkAllocateMemory(
                    device, vk.VkMemoryAllocateInfo(allocationSize=needed, memoryTypeIndex=kind), None
                )
            except Exception:
                vk.vkDestroyBuffer(device, buffer, None)
                raise
            vk.vkBindBufferMemory(device, buffer, memory, 0)
            view = np.frombuffer(vk.vkMapMemory(device, memory, 0, size, 0), np.uint8) if mapped else None
        self._blocks.append(_Block(buffer, memory, needed, view))
        return [Region(buffer, at, n, None if view is None else view[at : at + n]) for at, n in group]

    def _create_buffer(self, size: int) -> Any:
        vk = self._vk
        usage = (
            vk.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT
            | vk.VK_BUFFER_USAGE_TRANSFER_SRC_BIT
            | vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT
        )
        return vk.vkCreateBuffer(self._device.handle, vk.VkBufferCreateInfo(size=size, usage=usage), None)


class Ring:
    """Mapped memory through which writes pass: pieces are taken in turn, and are free once the device has
    copied them.

    `submit` submits the recorded commands and returns the timeline value that marks them done; `wait` waits
    for a value.
    """

    def __init__(self, region: Region, submit: Callable[[], int], wait: Callable[[int], None]) -> None:
        assert region.mapped is not None
        self.region = region
        self._bytes = region.mapped
        self._submit = submit
        self._wait = wait
        self._taken: deque[tuple[int, int, int]] = deque()  # (start, end, timeline value), oldest first
        self._at = 0

    @property
    def most(self) -> int:
        """The largest piece that `put` takes: several fit, so that one is copied while the next is filled."""
        return self.region.size // 4

    def put(self, data: Bytes, value: int) -> int:
        """Copy `data` into the ring and return its offset in the ring's buffer; it is free when the timeline
        reaches `value`.
        """
        size = -(-data.size // 16) * 16
        if self._at + size > self.region.size:
            while self._taken and self._taken[0][0] >= self._at:  # these pieces are of the round before
                value = self._free_oldest(value)
            self._at = 0
        start, end = self._at, self._at + size
        # the oldest piece lies next
        while self._taken and self._taken[0][0] < end and start < self._taken[0][1]:
            value = self._free_oldest(value)
        self._bytes[start : start + data.size] = data
        self._taken.append((start, end, value))
        self._at = end
        return self.region.offset + start

    def _free_oldest(self, value: int) -> int:
        """Wait until the oldest piece has been copied; return the timeline value of commands recorded from
        now on.
        """
        until = self._taken.popleft()[2]
        if until >= value:  # the piece is used by commands that are recorded, but not yet submitted
            value = self._submit() + 1
        self._wait(until)
        return value
