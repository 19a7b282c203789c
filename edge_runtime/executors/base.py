"""What the engine asks of a device: one small interface, one implementation per kind of device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]


class Executor(Protocol):
    """Runs the plans of one artifact over buffers that it owns.

    Caches whose layers look equally far back are a *group* (manifest.groups) with pages of its own: it is
    opened with a number of pages for each group, and reads the page table of group g from the buffer
    "page_table.g".

    Order: `write`, `run`, `fetch`, `copy_page`, `read_pages` and `write_pages` take effect in the order of
    the calls; each sees everything before it and nothing after it. None of them needs to wait for the device:
    only `read_pages`, and calling what `fetch` returned, do.

    Ownership: the executor owns all device memory from construction to `close`. Arrays given to `write` may
    be changed by the caller as soon as it returns; arrays that `fetch` yields are copies that belong to the
    caller.

    Threads: calls come from one thread at a time. The executor may release the GIL in any of them.

    Errors: DeviceError for what this device lacks, ArtifactError for what the artifact should have had. After
    an error in `run` the contents of buffers are undefined, and the executor can only be closed.
    """

    @property
    def name(self) -> str:
        """The kind of device, as its folder is called."""
        ...

    @property
    def precision(self) -> str:
        """What its program computes in: "f32" or "f16"."""
        ...

    @property
    def program_name(self) -> str:
        """The program it runs, as the manifest calls it."""
        ...

    def write(self, buffer: str, data: Array, row: int = 0, column: int = 0) -> None:
        """Overwrite rows row … row+len(data) of a buffer; dtype and row shape must fit.

        A row is what the first axis counts. Of a buffer with two axes also a part of one row: data [1, n]
        goes to its columns column … column+n.
        """
        ...

    def prepare(self, function: str, size: int, later: bool = False) -> Sequence[Future[Any]]:
        """Begin to compile what `run` of a bucket needs, and return at once.

        What is yet to be compiled, one a kernel: where it is empty, `run` starts at once, else it waits. What
        fails there leaves the executor as it was. `later`: nobody waits for it. It comes after what somebody
        waits for, and a device that computes with the host's cores leaves it until then.
        """
        ...

    def run(self, function: str, size: int) -> None:
        """Enqueue the plan of `function` for bucket `size`."""
        ...

    def fetch(self, buffer: str, rows: int) -> Callable[[], Array]:
        """Enqueue a copy of the first `rows` rows; call the result to wait for it and get it."""
        ...

    def copy_page(self, group: int, source: int, target: int) -> None:
        """Enqueue copying a whole page of a group: keys and values of all its caches."""
        ...

    def read_pages(self, group: int, pages: Sequence[int]) -> dict[str, Array]:
        """Copies of whole pages of a group; waits for the device.

        For each cache c of the group, by its number in the manifest, "kv.c.k" and "kv.c.v", [len(pages),
        kv_heads, page_size, head_dim] in the cache's dtype. Where the cache is quantized, instead of each:
        "kv.c.k.codes" (uint32), "kv.c.k.scales" and "kv.c.k.biases" (float), the last axis as long as a
        token's codes, groups and groups.
        """
        ...

    def write_pages(self, group: int, pages: Sequence[int], content: Mapping[str, Array]) -> None:
        """Overwrite whole pages with what `read_pages` of a cache of the same layout gave; all must fit."""
        ...

    def memory_used(self) -> int:
        """Bytes of device memory held: weights, cache, workspace and the rest."""
        ...

    def close(self) -> None:
        """Free everything. Safe to call twice; nothing else may be called afterwards."""
        ...
