"""Times the passes of an encoder by the device's own clock."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import numpy as np

from nearfar.edge_runtime.executors.planned import Stamps, seconds
from nearfar.edge_runtime.executors.webgpu.device import require_wgpu


class Timestamps:
    """Timestamps at the beginning and end of `count` passes, on a device with the feature
    `device.TIMESTAMPS`.
    """

    def __init__(self, device: Any, count: int) -> None:
        flags = require_wgpu().BufferUsage
        self._device, self._count = device, 2 * count
        size = 8 * self._count
        self._queries = device.create_query_set(type="timestamp", count=self._count)
        self._resolved = device.create_buffer(size=size, usage=flags.QUERY_RESOLVE | flags.COPY_SRC)
        self._landing = device.create_buffer(size=size, usage=flags.COPY_DST | flags.MAP_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for part in (self._queries, self._resolved, self._landing):
            part.destroy()

    def around(self, index: int) -> dict[str, Any]:
        """The `timestamp_writes` of a pass."""
        return {
            "query_set": self._queries,
            "beginning_of_pass_write_index": 2 * index,
            "end_of_pass_write_index": 2 * index + 1,
        }

    def end(self, encoder: Any) -> None:
        """Record a copy of the timestamps to memory that the host reads."""
        encoder.resolve_query_set(self._queries, 0, self._count, self._resolved, 0)
        encoder.copy_buffer_to_buffer(self._resolved, 0, self._landing, 0, 8 * self._count)

    def seconds(self) -> tuple[float, ...]:
        """The seconds of each pass; waits for the device."""
        self._landing.map_sync(require_wgpu().MapMode.READ)
        stamps: Stamps = np.frombuffer(self._landing.read_mapped(), np.uint64).reshape(-1, 2).copy()
        self._landing.unmap()
        return seconds(stamps[:, 0], stamps[:, 1], 1e-9 * _period(self._device))


def _period(device: Any) -> float:
    """Nanoseconds of a tick. wgpu-native (29) returns raw ticks, whose length wgpu-py (0.32)
    does not tell.

    WebGPU's own timestamps are nanoseconds.
    """
    from wgpu.backends.wgpu_native import lib

    return float(lib.wgpuQueueGetTimestampPeriod(device.queue._internal))
