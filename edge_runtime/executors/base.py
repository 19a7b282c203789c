"""The interface between the engine and a device: one small protocol, one implementation for each kind of
device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]


class Executor(Protocol):
    """Runs the plans of one artifact over buffers that it owns.

    Caches of layers with the same window are a *group* (manifest.groups) with pages of its own: an executor
    is opened with a number of pages for each group, and reads the page table of group g from the buffer
    "page_table.g".

    Order: `write`, `run`, `fetch`, `copy_page`, `read_pages` and `write_pages` take effect in the order of
    the calls; each sees the effects of earlier calls only. Only `read_pages`, and a call of the function that
    `fetch` returned, need to wait for the device.

    Ownership: the executor owns all device memory from construction to `close`. The caller may change an
    array given to `write` as soon as `write` returns; arrays returned by `fetch` are copies that belong to
    the caller.

    Threads: calls come from one thread at a time. The executor may release the GIL in any of them.

    Errors: DeviceError for something that this device lacks, ArtifactError for something that the artifact
    lacks. After an error in `run` the contents of buffers are undefined, and the executor can only be closed.
    """

    @property
    def name(self) -> str:
        """The kind of device: the name of its folder."""
        ...

    @property
    def precision(self) -> str:
        """The precision in which its program computes: "f32" or "f16"."""
        ...

    @property
    def program_name(self) -> str:
        """The name of its program in the manifest."""
        ...

    def write(self, buffer: str, data: Array, row: int = 0, column: int = 0) -> None:
        """Overwrite rows row … row+len(data) of a buffer; dtype and row shape must match.

        Rows are counted by the first axis. In a buffer with two axes, data [1, n] may also overwrite a part
        of one row: columns column … column+n.
        """
        ...

    def prepare(self, function: str, size: int, later: bool = False) -> Sequence[Future[Any]]:
        """Begin to compile the kernels that `run` of a bucket needs, and return at once.

        Returns a future for each kernel that still has to be compiled: if there are none, `run` starts at
        once, else it waits. An error of a compilation leaves the executor as it was. `later`: no request
        waits for these kernels. They are compiled after those that requests wait for; a device that computes
        with the host's cores does not compile them before `run`.
        """
        ...

    def run(self, function: str, size: int) -> None:
        """Enqueue the plan of `function` for bucket `size`."""
        ...

    def fetch(self, buffer: str, rows: int) -> Callable[[], Array]:
        """Enqueue a copy of the first `rows` rows; the returned function waits for it and returns it."""
        ...

    def copy_page(self, group: int, source: int, target: int) -> None:
        """Enqueue a copy of a whole page of a group: keys and values of all its caches."""
        ...

    def read_pages(self, group: int, pages: Sequence[int]) -> dict[str, Array]:
        """Copy whole pages of a group to the host; waits for the device.

        Returns "kv.c.k" and "kv.c.v" for each cache c of the group (its number in the manifest), [len(pages),
        kv_heads, page_size, head_dim] in the cache's dtype. A quantized cache has instead "kv.c.k.codes"
        (uint32), "kv.c.k.scales" and "kv.c.k.biases" (float), and the same for v; their last axes are a
        token's words of codes, its groups, and its groups.
        """
        ...

    def write_pages(self, group: int, pages: Sequence[int], content: Mapping[str, Array]) -> None:
        """Overwrite whole pages with the result of `read_pages` from a cache of the same layout; all shapes
        must match.
        """
        ...

    def memory_used(self) -> int:
        """Bytes of device memory in use: weights, cache, workspace and the rest."""
        ...

    def close(self) -> None:
        """Free everything. Safe to call twice; nothing else may be called afterwards."""
        ...
