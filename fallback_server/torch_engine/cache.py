"""The tensors of the paged KV cache, and the description of a step for the attention function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from nearfar.fallback_server.torch_engine.native import NativeDecode
from nearfar.fallback_server.torch_engine.scheduler import WorkChunk
from nearfar.format.sizes import pages_for

SPREAD = 2.0
"""Largest ratio of the longest to the shortest sequence in a decode group."""
MASK_SIZE = 1 << 23
"""Most elements (query rows times keys) of a mask that is made at once, per query head that shares a key
head.
"""
FEW_PAGES = 8
"""Number of pages below which padding costs less than a separate group."""


@dataclass(frozen=True)
class LayerShape:
    """Shape of a layer's keys and values: number of heads, and the dimension of a key and of a value."""

    kv_heads: int
    key_dim: int
    value_dim: int


class KVCache:
    """Keys and values of all layers, each [pages + 2, page_size, kv_heads, dim].

    Page `padding` is always zero and fills up tables; page `trash` takes what nobody reads.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        decode: NativeDecode | None = None,
    ) -> None:
        self.pages = pages
        self.padding = pages
        self.trash = pages + 1
        self.page_size = page_size
        self.device = device
        self.decode = decode if decode is not None and decode.supports(dtype) else None

        def empty(shape: LayerShape, dim: int) -> torch.Tensor:
            return torch.zeros(pages + 2, page_size, shape.kv_heads, dim, dtype=dtype, device=device)

        self._scratch: dict[tuple[str, int], torch.Tensor] = {}
        self.keys = [empty(shape, shape.key_dim) for shape in layers]
        self.values = [empty(shape, shape.value_dim) for shape in layers]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def write(self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store keys and values [N, kv_heads, dim] at token rows int64 [N] (page · page_size + offset)."""
        self.keys[layer].view(-1, *key.shape[1:]).index_copy_(0, rows, key)
        self.values[layer].view(-1, *value.shape[1:]).index_copy_(0, rows, value)

    def gather(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of keys and values of pages int64 [P]: [P · page_size, kv_heads, dim], valid until
        the next gather.
        """
        return self._gather("keys", self.keys[layer], pages), self._gather(
            "values", self.values[layer], pages
        )

    def _gather(self, name: str, tensor: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        if self.device.type != "cpu":
            return tensor.index_select(0, pages).flatten(0, 1)
        # The buffer is kept from layer to layer: fresh memory of this size costs page faults, twice the time
        # of the copy.
        row = tensor[0].numel()
        held = self._scratch.get((name, row))
        if held is None or held.numel() < len(pages) * row:
            held = self._scratch[name, row] = tensor.new_empty(len(pages) * row * 5 // 4)
        out = held[: len(pages) * row].view(len(pages), *tensor.shape[1:])
        torch.index_select(tensor, 0, pages, out=out)
        return out.flatten(0, 1)

    def clear(self, pages: torch.Tensor) -> None:
        """Zero the pages int64 [P] of all layers.

        A page that is taken again may hold NaN or infinity from its former owner, and masked scores are still
        added up: 0 · NaN is NaN. So one broken sequence would break those that inherit its pages.
        """
        for tensor in (*self.keys, *self.values):
            tensor.index_fill_(0, pages, 0)


def token_bytes(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values in all layers."""
    return sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in layers) * dtype.itemsize


@dataclass(frozen=True)
class DecodeGroup:
    """Rows start … stop - 1, one per sequence, with `pages` int64 [rows, P] and `lengths` int64 [rows] in
    tokens.
    """

    start: int
    stop: int
    pages: torch.Tensor
    lengths: torch.Tensor
    biases: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def bias(self, page_size: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """The bias on the scores, [rows, 1, 1, P · page_size]: -inf beyond the sequence and before the
        window, else 0.
        """
        if window not in self.biases:
            at = torch.arange(self.pages.shape[1] * page_size, device=self.pages.device)
            lengths = self.lengths[:, None]
            hidden = at >= lengths
            if window is not None:
                hidden |= at < lengths - window
            bias = torch.zeros(hidden.shape, dtype=dtype, device=at.device).masked_fill_(hidden, -torch.inf)
            self.biases[window] = bias[:, None, None]
        return self.biases[window]


@dataclass(frozen=True)
class PrefillRows:
    """Rows start … stop - 1: consecutive positions, from `position`, of one sequence in `pages` int64 [P]."""

    start: int
    stop: int
    position: int
    pages: torch.Tensor
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens of the sequence, the last of these rows included."""
        return self.position + self.stop - self.start

    def mask(self, window: int | None, groups: int) -> torch.Tensor:
        """The mask of visible keys, bool [groups · rows, length]: the causal triangle, once for each query
        head of a group.
        """
        if window not in self.masks:
            at = torch.arange(self.length, device=self.pages.device)
            row = torch.arange(self.position, self.length, device=self.pages.device)[:, None]
            seen = at <= row
            if window is not None:
                seen &= at > row - window
            self.masks[window] = seen.repeat(groups, 1)
        return self.masks[window]


@dataclass(frozen=True)
class PagedStep:
    """The input of attention for one step. With `cache` None nothing is kept, and every sequence is complete
    in its rows.
    """

    cache: KVCache | None
    # int64 [N], the token row in the cache of each row; None if nothing is written
    write: torch.Tensor | None
    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillRows, ...]
    shapes: dict[int, LayerShape] | None = None  # filled by each layer if given
    pulse: Callable[[], None] | None = None  # called by each layer, as a sign of life within a step


@dataclass(frozen=True)
class Batch:
    """A step that is ready to run: chunks in row order, token ids and positions int64 [1, N] on the device.

    `fresh`: newly begun pages, int64 [P], which are cleared first.
    """

    chunks: tuple[WorkChunk, ...]
    tokens: torch.Tensor
    positions: torch.Tensor
    step: PagedStep
    fresh: torch.Tensor | None


def build_batch(
    cache: KVCache, planned: Sequence[WorkChunk], pulse: Callable[[], None] | None = None
) -> Batch:
    """Lay out the rows of a step: single rows first, by length, then the longer chunks."""
    singles = sorted((chunk for chunk in planned if chunk.count == 1), key=lambda chunk: chunk.start)
    chunks = (*singles, *(chunk for chunk in planned if chunk.count > 1))
    tokens: list[int] = []
    positions: list[int] = []
    write: list[int] = []
    for chunk in chunks:
        stop = chunk.start + chunk.count
        tokens += chunk.work.tokens[chunk.start : stop]
        positions += range(chunk.start, stop)
        write += _write_rows(chunk, cache)
    packed = torch.tensor([tokens, positions, write], dtype=torch.int64).to(cache.device, non_blocking=True)
    prefill: list[PrefillRows] = []
    row = len(singles)
    for chunk in chunks[len(singles) :]:
        prefill += _prefill_rows(cache, chunk, row)
        row += chunk.count
    step = PagedStep(cache, packed[2], tuple(_decode_groups(cache, singles)), tuple(prefill), pulse=pulse)
    fresh = [page for chunk in chunks for page in _begun(chunk, cache.page_size)]
    cleared = torch.tensor(fresh, dtype=torch.int64).to(cache.device, non_blocking=True) if fresh else None
    return Batch(chunks, packed[0:1], packed[1:2], step, cleared)


def _begun(chunk: WorkChunk, size: int) -> list[int]:
    """Pages whose first row is among the chunk's."""
    first = pages_for(chunk.start, size)
    return [chunk.pages[index] for index in range(first, len(chunk.pages)) if index not in chunk.known]


def _prefill_rows(cache: KVCache, chunk: WorkChunk, row: int) -> Iterator[PrefillRows]:
    """Yield the rows of a chunk in pieces small enough for their mask; a chunk from position 0 needs no
    pieces.
    """
    piece = chunk.count if chunk.start == 0 else max(MASK_SIZE // (chunk.start + chunk.count), 16)
    for offset in range(0, chunk.count, piece):
        count = min(piece, chunk.count - offset)
        held = chunk.pages[: pages_for(chunk.start + offset + count, cache.page_size)]
        pages = torch.tensor(held, dtype=torch.int64).to(cache.device, non_blocking=True)
        yield PrefillRows(row + offset, row + offset + count, chunk.start + offset, pages)


def _write_rows(chunk: WorkChunk, cache: KVCache) -> list[int]:
    size, rows = cache.page_size, []
    for position in range(chunk.start, chunk.start + chunk.count):
        index, offset = divmod(position, size)
        page = cache.trash if index in chunk.known else chunk.pages[index]
        rows.append(page * size + offset)
    return rows


def _decode_groups(cache: KVCache, singles: Sequence[WorkChunk]) -> list[DecodeGroup]:
    """Group sequences of similar length, so that each group shares a padded gather."""
    groups, start = [], 0
    while start < len(singles):
        shortest = max(len(singles[start].pages), FEW_PAGES)
        stop = start + 1
        # The native kernel reads no padding.
        while stop < len(singles) and (cache.decode or len(singles[stop].pages) <= shortest * SPREAD):
            stop += 1
        width = len(singles[stop - 1].pages)
        table = [
            [*chunk.pages, *[cache.padding] * (width - len(chunk.pages))] for chunk in singles[start:stop]
        ]
        lengths = [chunk.start + 1 for chunk in singles[start:stop]]
        groups.append(
            DecodeGroup(
                start,
                stop,
                torch.tensor(table, dtype=torch.int64).to(cache.device, non_blocking=True),
                torch.tensor(lengths, dtype=torch.int64).to(cache.device, non_blocking=True),
            )
        )
        start = stop
    return groups
