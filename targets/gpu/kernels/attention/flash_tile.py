"""The tiles of attention for many rows (flash_prefill.py), and their parts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from nearfar.kernels.jobs import Attend
from nearfar.targets.gpu.classes import SHARED_BYTES, DeviceClass
from nearfar.targets.gpu.kernels.attention.heads import HeadVectors, heads_together, seen
from nearfar.targets.gpu.kernels.common import ceil_div

MAX_THREADS = 256
MAX_HEADS = 8  # the most query heads of a workgroup
MIN_QUERIES, MIN_KEYS = 8, 8
KEYS = (4, 2, 1)  # the possible numbers of keys of a thread
SLICE = 64  # the most dimensions that are staged at a time
LEAST, MAX_PARTS = 128, 16  # the least positions of a part; the most parts of a tile
FEW_TILES, FEWER_ROWS = 4, 4  # in a step of at most 4 tiles, tiles of few rows have 4 times the parts


@dataclass(frozen=True)
class Tile:
    """`queries` rows of `heads` heads by `keys` positions.

    A thread has `own_keys` of the keys, and the head is staged `slice` vectors at a time.
    """

    threads: int
    queries: int
    heads: int
    keys: int
    own_keys: int
    slice: int
    parts: int = 1
    """The most parts into which the positions that a full tile sees are split."""

    @property
    def vectors(self) -> int:
        """Query vectors: rows times heads."""
        return self.queries * self.heads

    @property
    def lanes(self) -> int:
        """The number of threads that have the same vectors."""
        return self.keys // self.own_keys

    @property
    def groups(self) -> int:
        """The number of groups of threads; the threads of a group have the same vectors."""
        return self.threads // self.lanes

    def columns(self, head: HeadVectors) -> int:
        """The number of a head's vectors whose values a thread sums."""
        return head.count // self.slice * ceil_div(self.slice, self.lanes)

    def sums(self, head: HeadVectors) -> int:
        """The number of values that a thread sums."""
        return self.vectors // self.groups * self.columns(head) * head.width

    def shared_bytes(self, head: HeadVectors) -> int:
        """Bytes of workgroup memory: the stage, weights, and values that lanes of the same vectors
        exchange.
        """
        stage = self.keys * (self.slice + 1) * head.width
        return 4 * (stage + self.vectors * (self.keys + 1 + self.lanes))


def tile_of(job: Attend, device: DeviceClass) -> Tile:
    """The tile with the most query vectors, then the most rows, keys and staged dimensions, in as many parts
    as give the launch the threads that its class requires.
    """
    head, threads = HeadVectors.of(job), min(2 * device.threads, MAX_THREADS)
    queries = [size for size in (64, 32, 16, 8) if MIN_QUERIES <= size <= device.queries]
    keys = [size for size in (64, 32, 16, 8) if MIN_KEYS <= size <= device.keys]
    slices = [size for size in range(SLICE // head.width, 0, -1) if head.count % size == 0]
    tiles = [
        Tile(threads, *sizes)
        for sizes in product(queries, heads_together(job, MAX_HEADS), keys, KEYS, slices[:3])
    ]
    memories = device.shared_bytes, SHARED_BYTES
    fit = next(filter(None, ([t for t in tiles if _fits(t, head, device, memory)] for memory in memories)))
    tile = max(fit, key=lambda tile: (tile.vectors, tile.queries, tile.keys, tile.slice, tile.own_keys))
    launched = ceil_div(job.m, tile.queries) * job.heads // tile.heads * threads
    parts = min(ceil_div(device.launched, launched), MAX_PARTS, ceil_div(seen(job), LEAST))
    return replace(tile, parts=parts)


def _fits(tile: Tile, head: HeadVectors, device: DeviceClass, memory: int) -> bool:
    whole = tile.groups <= tile.vectors and tile.vectors % tile.groups == 0
    registers = 2 * device.queries  # 32 registers on a mobile GPU, 64 on others
    return whole and tile.sums(head) <= registers and tile.shared_bytes(head) <= memory


def most_parts(job: Attend, tile: Tile) -> int:
    """The most parts of a tile with few rows, as in a step that continues a prompt and also decodes."""
    more = FEWER_ROWS if job.m <= FEW_TILES * tile.queries else 1
    return min(tile.parts * more, MAX_PARTS, ceil_div(seen(job), LEAST))
