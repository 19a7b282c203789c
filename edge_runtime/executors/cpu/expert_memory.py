"""Keeps the experts that were chosen last in memory, if the weights of a model are larger than memory.

Mapped files would leave this to the system. But it reads what lies around each missing page, and gives up
pages one by one while a token waits: with 1.2 GB of memory for 2.5 GB of weights, decode was a fifth as fast.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nearfar.errors import ArtifactError
from nearfar.memory import host_memory

LEAST = 64 << 10
"""Bytes of a matrix that is worth a read of its own; smaller ones are kept in memory."""
AT_ONCE = 2 << 20
"""Bytes of one read."""
READERS = 4
"""Reads at a time: a solid-state disk reaches its speed with several."""
PAGE = mmap.PAGESIZE
SPARE = 16
"""Part of the free memory that stays free: a sixteenth."""


def room_for(others: int, stacks: Sequence[int]) -> int | None:
    """Bytes for experts beside `others` bytes; None if the experts of a layer would not have room, or if
    there are none. `stacks`: the bytes of each tensor of experts; a layer has two.
    """
    available = host_memory().available
    room = available - available // SPARE - others
    return room if stacks and room >= 2 * max(stacks) else None


@dataclass(frozen=True)
class ExpertStack:
    """The matrices of a layer's experts in the weight stream: where the first one begins, and the bytes of
    each.
    """

    start: int
    each: int


@dataclass(frozen=True)
class ChosenExperts:
    """The experts by which a launch multiplies.

    `launch`: its number in the plan. `route`: the numbers of the rows' experts, [rows, top], where the step
    writes them; a number below 0 is none.
    """

    launch: int
    route: npt.NDArray[np.float32]
    stacks: tuple[ExpertStack, ...]

    def matrices(self) -> list[tuple[int, int]]:
        """Start and bytes of each chosen matrix."""
        chosen = np.unique(self.route).astype(np.int64)
        numbers = chosen[chosen >= 0].tolist()
        return [
            (stack.start + number * stack.each, stack.each) for stack in self.stacks for number in numbers
        ]


class ExpertMemory:
    """An area of memory, as large as the weight stream, of which only the experts used last take memory."""

    def __init__(self, files: Sequence[tuple[Path, int]], apart: int, room: int) -> None:
        """`files`: the stream's files with their bytes, which begin every `apart` bytes. `room`: the most
        bytes of experts in memory.
        """
        size = -(-((len(files) - 1) * apart + files[-1][1]) // PAGE) * PAGE
        no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
        # Small pages: a huge page stays whole as long as one of the matrices in it is used.
        self.area = np.frombuffer(self._memory, np.uint8)
        self._view = memoryview(self._memory)
        self._apart, self._room = apart, room
        self._paths, self._sizes = zip(*files, strict=True)
        self._files = [_open(path, count) for path, count in files]
        self._readers = ThreadPoolExecutor(READERS, "nearfar-experts")
        self._held: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._bytes = 0

    def hold(self, matrices: Sequence[tuple[int, int]]) -> None:
        """Read those of the matrices (start, bytes) that are not in memory, in place of those that were used
        longest ago. ArtifactError if a file cannot be read.
        """
        missing = []
        for matrix in matrices:
            if matrix in self._held:
                self._held.move_to_end(matrix)
            else:
                missing.append(matrix)
        wanted = sum(size for _, size in missing)
        for _ in range(len(self._held) - (len(matrices) - len(missing))):
            if self._bytes + wanted <= self._room:
                break
            self._drop()
        list(self._readers.map(self._read, [part for matrix in missing for part in self._parts(*matrix)]))
        self._held.update(dict.fromkeys(missing))
        self._bytes += wanted

    def close(self) -> None:
        """Close the files."""
        self._readers.shutdown()
        for file in self._files:
            os.close(file)
        self._files = []

    def _drop(self) -> None:
        """Give up the matrix that was used longest ago, except pages that it shares with its neighbours."""
        (start, size), _ = self._held.popitem(last=False)
        self._bytes -= size
        first, end = -(-start // PAGE) * PAGE, (start + size) // PAGE * PAGE
        if first < end:
            self._memory.madvise(mmap.MADV_DONTNEED, first, end - first)

    def _parts(self, start: int, size: int) -> list[tuple[int, int]]:
        """Start and bytes of the reads of a matrix: whole pages, each in one file."""
        at, end, parts = start // PAGE * PAGE, start + size, []
        while at < end:
            border = (at // self._apart + 1) * self._apart
            count = min(AT_ONCE, border - at, -(-(end - at) // PAGE) * PAGE)
            parts.append((at, count))
            at += count
        return parts

    def _read(self, part: tuple[int, int]) -> None:
        at, count = part
        index, offset = divmod(at, self._apart)
        there = min(count, self._sizes[index] - offset)
        try:
            got = os.preadv(self._files[index], [self._view[at : at + count]], offset)
        except OSError as error:
            raise ArtifactError(f"{self._paths[index]} cannot be read: {error.strerror}") from error
        if got < there:
            raise ArtifactError(
                f"{self._paths[index]} is truncated: {got} bytes at {offset} instead of {there}. Copy the "
                "artifact again, or build it again"
            )


def _open(path: Path, size: int) -> int:
    """Open a file of at least `size` bytes for reads beside the page cache, if its file system has them."""
    direct = getattr(os, "O_DIRECT", 0)
    try:
        file = os.open(path, os.O_RDONLY | direct)
    except OSError as error:
        if error.errno != errno.EINVAL or not direct:
            raise
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
    if os.fstat(file).st_size < size:
        os.close(file)
        raise ArtifactError(f"{path} is truncated. Copy the artifact again, or build it again")
    return file
