"""The queue: command buffers, reused or for one use, submitted in batches, and a timeline that counts
finished ones.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nearfar.edge_runtime.executors.vulkan.binding import TIMEOUT, check, guard, require_vulkan
from nearfar.edge_runtime.executors.vulkan.device import LogicalDevice

BATCH = 32
"""The most command buffers in one submission; a step has three or four."""

SLICE_NS = 500_000_000
"""Nanoseconds of one part of a wait: between parts the thread can be interrupted."""

ALL_STAGES = 0x800 | 0x1000 | 0x4000  # compute shader, transfer, host
DEVICE_STAGES = 0x800 | 0x1000
WRITES = 0x40 | 0x1000 | 0x4000  # shader write, transfer write, host write
ANYTHING = 0x20 | 0x40 | 0x800 | 0x1000  # shader read and write, transfer read and write
HOST_STAGE, HOST_READ = 0x4000, 0x2000


@dataclass(frozen=True)
class Dispatch:
    """One launch, ready to record.

    `reads` and `writes` name the buffers that it uses; a buffer that it reads and writes is in both.
    """

    pipeline: Any
    layout: Any
    descriptors: Any
    grid: tuple[int, int, int]
    reads: frozenset[str]
    writes: frozenset[str]


def barriers(launches: Sequence[Dispatch]) -> list[bool]:
    """Decide for each launch whether a barrier precedes it.

    A barrier precedes launches that use a buffer written since the last barrier, or write one that was read.
    """
    read: set[str] = set()
    written: set[str] = set()
    out = []
    for launch in launches:
        out.append(not (written.isdisjoint(launch.reads | launch.writes) and read.isdisjoint(launch.writes)))
        if out[-1]:
            read, written = set(), set()
        read |= launch.reads
        written |= launch.writes
    return out


class Queue:
    """Submits command buffers in order. Each begins with a barrier (`begin`), so that it sees all earlier
    work.
    """

    def __init__(self, device: LogicalDevice) -> None:
        vk = require_vulkan()
        self._lib, self._ffi, self._vk = vk.lib, vk.ffi, vk
        self._device = device
        self._name = device.gpu.name
        self.waited = 0.0
        """Seconds spent waiting for the device."""
        with guard(self._name, "making its queue"):
            self._pool = vk.vkCreateCommandPool(
                device.handle,
                vk.VkCommandPoolCreateInfo(
                    flags=vk.VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT,
                    queueFamilyIndex=device.gpu.queue_family,
                ),
                None,
            )
            kind = vk.VkSemaphoreTypeCreateInfo(semaphoreType=vk.VK_SEMAPHORE_TYPE_TIMELINE, initialValue=0)
            self._timeline = vk.vkCreateSemaphore(device.handle, vk.VkSemaphoreCreateInfo(pNext=kind), None)
        self._pending: list[Any] = []
        self._used: deque[tuple[int, Any]] = (
            deque()
        )  # command buffers of one use, with the value that frees them
        self._submitted = self._reached = 0
        self.submit_call = vk.lib.vkQueueSubmit
        """The C function that submits work."""
        self._prepare_structs()

    def _prepare_structs(self) -> None:
        """Make the structs of every submission and wait once."""
        ffi, vk = self._ffi, self._vk
        self._commands = ffi.new("VkCommandBuffer[]", BATCH)
        self._semaphores = ffi.new("VkSemaphore[]", [self._timeline])
        self._signal = ffi.new("uint64_t[]", 1)
        self._awaited = ffi.new("uint64_t[]", 1)
        self._counter = ffi.new("uint64_t*")
        values = {
            "sType": vk.VK_STRUCTURE_TYPE_TIMELINE_SEMAPHORE_SUBMIT_INFO,
            "signalSemaphoreValueCount": 1,
            "pSignalSemaphoreValues": self._signal,
        }
        self._values = ffi.new("VkTimelineSemaphoreSubmitInfo*", values)
        submit = {
            "sType": vk.VK_STRUCTURE_TYPE_SUBMIT_INFO,
            "pNext": self._values,
            "pCommandBuffers": self._commands,
            "signalSemaphoreCount": 1,
            "pSignalSemaphores": self._semaphores,
        }
        self._info = ffi.new("VkSubmitInfo*", submit)
        wait = {
            "sType": vk.VK_STRUCTURE_TYPE_SEMAPHORE_WAIT_INFO,
            "semaphoreCount": 1,
            "pSemaphores": self._semaphores,
            "pValues": self._awaited,
        }
        self._wait_info = ffi.new("VkSemaphoreWaitInfo*", wait)
        begin = {"sType": vk.VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO}
        self._begin_once = ffi.new("VkCommandBufferBeginInfo*", {**begin, "flags": 1})  # one time submit
        self._begin_kept = ffi.new("VkCommandBufferBeginInfo*", {**begin, "flags": 4})  # simultaneous use
        barrier = {"sType": vk.VK_STRUCTURE_TYPE_MEMORY_BARRIER}
        self._all = ffi.new(
            "VkMemoryBarrier*", {**barrier, "srcAccessMask": WRITES, "dstAccessMask": ANYTHING}
        )
        self._compute = ffi.new("VkMemoryBarrier*", {**barrier, "srcAccessMask": 0x40, "dstAccessMask": 0x60})
        self._to_host = ffi.new(
            "VkMemoryBarrier*", {**barrier, "srcAccessMask": 0x1040, "dstAccessMask": HOST_READ}
        )
        self._region = ffi.new("VkBufferCopy*")
        self._sets = ffi.new("VkDescriptorSet[]", 1)

    @property
    def next(self) -> int:
        """The timeline value that marks the commands added now as done."""
        return self._submitted + 1

    @property
    def idle(self) -> bool:
        """Whether the device is known to have done everything; no query is made, since it takes 17 µs of each
        step.
        """
        return not self._pending and self._reached >= self._submitted

    def add(self, commands: Any) -> None:
        """Queue a command buffer after the earlier ones; `submit` submits them together."""
        self._pending.append(commands)
        if len(self._pending) == BATCH:
            self.submit()

    def submit(self) -> int:
        """Submit the added command buffers; return the timeline value that marks them done."""
        count = len(self._pending)
        if count:
            self._commands[0:count] = self._pending
            self._info.commandBufferCount = count
            self._signal[0] = self._submitted + 1
            self._pending.clear()
            result = self.submit_call(self._device.queue, 1, self._info, self._ffi.NULL)
            check(result, self._name, "taking a step")
            self._submitted += 1
        return self._submitted

    def reached(self, value: int) -> bool:
        """Whether the timeline has reached a value."""
        if self._reached < value:
            result = self._lib.vkGetSemaphoreCounterValue(self._device.handle, self._timeline, self._counter)
            check(result, self._name, "computing a step")
            self._reached = self._counter[0]
        return self._reached >= value

    def wait(self, value: int) -> None:
        """Wait until the timeline reaches a submitted value."""
        if self._reached >= value:
            return
        self._awaited[0] = value
        start = time.perf_counter()
        while (
            result := self._lib.vkWaitSemaphores(self._device.handle, self._wait_info, SLICE_NS)
        ) == TIMEOUT:
            pass
        self.waited += time.perf_counter() - start
        check(result, self._name, "computing a step")
        self._reached = max(self._reached, value)

    def once(self) -> Any:
        """Begin a command buffer for one use."""
        free = self._used and self.reached(self._used[0][0])
        commands = self._used.popleft()[1] if free else self._allocate()
        self._begin(commands, self._begin_once)
        return commands

    def add_once(self, commands: Any) -> None:
        """End a command buffer from `once` and queue it."""
        self.end(commands)
        self.add(commands)
        self._used.append((self.next, commands))

    def kept(self) -> Any:
        """Begin a command buffer that is kept; it may be submitted again while it runs."""
        commands = self._allocate()
        self._begin(commands, self._begin_kept)
        return commands

    def end(self, commands: Any) -> None:
        """End the recording of a command buffer."""
        check(self._lib.vkEndCommandBuffer(commands), self._name, "recording a step")

    def record(
        self, commands: Any, launches: Sequence[Dispatch], behind: Callable[[Any, int], None] | None = None
    ) -> None:
        """Record launches with the barriers that `barriers` puts between them.

        `behind`: called after each launch with the command buffer and the launch's number, to record
        something more.
        """
        lib = self._lib
        pipeline = None
        for index, (launch, dependent) in enumerate(zip(launches, barriers(launches), strict=True)):
            if dependent:
                self._barrier(commands, 0x800, 0x800, self._compute)
            if launch.pipeline != pipeline:
                pipeline = launch.pipeline
                lib.vkCmdBindPipeline(commands, 1, pipeline)
            self._sets[0] = launch.descriptors
            lib.vkCmdBindDescriptorSets(commands, 1, launch.layout, 0, 1, self._sets, 0, self._ffi.NULL)
            lib.vkCmdDispatch(commands, *launch.grid)
            if behind is not None:
                behind(commands, index)

    def copy(self, commands: Any, source: tuple[Any, int], target: tuple[Any, int], size: int) -> None:
        """Record a copy of bytes between buffers, each given with an offset."""
        self._region.srcOffset, self._region.dstOffset, self._region.size = source[1], target[1], size
        self._lib.vkCmdCopyBuffer(commands, source[0], target[0], 1, self._region)

    def fill(self, commands: Any, buffer: Any, offset: int, size: int) -> None:
        """Record filling bytes with zero; `offset` and `size` are multiples of 4."""
        self._lib.vkCmdFillBuffer(commands, buffer, offset, size, 0)

    def barrier(self, commands: Any) -> None:
        """Record a barrier: later commands see the effects of all earlier ones."""
        self._barrier(commands, ALL_STAGES, DEVICE_STAGES, self._all)

    def to_host(self, commands: Any) -> None:
        """Record a barrier after writes that the host will read."""
        self._barrier(commands, DEVICE_STAGES, HOST_STAGE, self._to_host)

    def close(self) -> None:
        """Wait for the device, if it still responds, and free the queue's objects."""
        vk, device = self._vk, self._device.handle
        self._lib.vkDeviceWaitIdle(device)  # a lost device returns at once; its objects may be destroyed
        vk.vkDestroyCommandPool(device, self._pool, None)
        vk.vkDestroySemaphore(device, self._timeline, None)

    def _begin(self, commands: Any, how: Any) -> None:
        check(self._lib.vkBeginCommandBuffer(commands, how), self._name, "recording a step")
        self.barrier(commands)

    def _barrier(self, commands: Any, source: int, target: int, memory: Any) -> None:
        null = self._ffi.NULL
        self._lib.vkCmdPipelineBarrier(commands, source, target, 0, 1, memory, 0, null, 0, null)

    def _allocate(self) -> Any:
        vk = self._vk
        information = vk.VkCommandBufferAllocateInfo(
            commandPool=self._pool, level=vk.VK_COMMAND_BUFFER_LEVEL_PRIMARY, commandBufferCount=1
        )
        with guard(self._name, "recording a step"):
            return vk.vkAllocateCommandBuffers(self._device.handle, information)[0]
