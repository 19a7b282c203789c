"""Times the launches of a recorded plan by the device's own clock."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import numpy as np

from nearfar.edge_runtime.executors.planned import Stamps, seconds
from nearfar.edge_runtime.executors.vulkan.binding import check, guard, require_vulkan
from nearfar.edge_runtime.executors.vulkan.device import LogicalDevice
from nearfar.errors import DeviceError

BOTTOM = 0x2000  # VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT: the time when all earlier work has ended
WIDE, WAIT = 0x1, 0x2  # VK_QUERY_RESULT_64_BIT, VK_QUERY_RESULT_WAIT_BIT


class Timestamps:
    """A query pool with a timestamp before the first of `count` launches, and one after each launch.

    Launches without a barrier between them may run at the same time; their common time is counted for the
    last one.
    """

    def __init__(self, device: LogicalDevice, count: int) -> None:
        """DeviceError if the device's queue has no clock."""
        vk = require_vulkan()
        self._vk, self._device, self._count = vk, device, count + 1
        gpu = device.gpu
        family = vk.vkGetPhysicalDeviceQueueFamilyProperties(gpu.handle)[gpu.queue_family]
        self._bits = int(family.timestampValidBits)
        if not self._bits:
            raise DeviceError(
                f"{gpu.name} has no timestamps on its queue for compute (timestampValidBits is 0), so it "
                "cannot tell what a launch takes. Measure on another device (nearfar devices lists them)"
            )
        properties = vk.vkGetPhysicalDeviceProperties(gpu.handle)
        self._tick = float(properties.limits.timestampPeriod) * 1e-9
        information = vk.VkQueryPoolCreateInfo(queryType=vk.VK_QUERY_TYPE_TIMESTAMP, queryCount=self._count)
        with guard(gpu.name, "preparing timestamps"):
            self._pool = vk.vkCreateQueryPool(device.handle, information, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._vk.vkDestroyQueryPool(self._device.handle, self._pool, None)

    def begin(self, commands: Any) -> None:
        """Record the first timestamp."""
        self._vk.lib.vkCmdResetQueryPool(commands, self._pool, 0, self._count)
        self.stamp(commands, -1)

    def stamp(self, commands: Any, launch: int) -> None:
        """Record the timestamp after a launch."""
        self._vk.lib.vkCmdWriteTimestamp(commands, BOTTOM, self._pool, launch + 1)

    def seconds(self) -> tuple[float, ...]:
        """The seconds of each launch, once the commands are done."""
        stamps: Stamps = np.zeros(self._count, np.uint64)
        data = self._vk.ffi.from_buffer(stamps)
        result = self._vk.lib.vkGetQueryPoolResults(
            self._device.handle, self._pool, 0, self._count, stamps.nbytes, data, 8, WIDE | WAIT
        )
        check(result, self._device.gpu.name, "reading timestamps")
        return seconds(stamps[:-1], stamps[1:], self._tick, self._bits)
