"""Copies pages between the cache on the device and tensors on the host, while requests run.

A page is held from the moment it is found until it has been copied; a page that is filled enters the prefix
index only after its content has been written. So no request ever sees an incomplete page.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nearfar.edge_runtime.cache import Sequence
from nearfar.edge_runtime.engine.sampling_params import SamplingParams
from nearfar.errors import DeviceError, DeviceLost, SnapshotError

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from nearfar.edge_runtime.engine.core import EngineCore
    from nearfar.format.manifest import Manifest

Array = npt.NDArray[Any]
STATES, TAKEN = ".s", ".x"
"""Endings of the names of states, and of caches of one tensor (nearfar.format.buffers)."""
CHUNK_BYTES = 32 << 20
"""Bytes that are copied at a time: running requests wait no longer than this takes."""

ATTEMPTS = 3
"""The most attempts to compute a prefix that other requests evict before it is read."""


async def capture(core: EngineCore, tokens: Seq[int]) -> dict[str, Array]:
    """Keys and values of `tokens` (whole pages), computed first if the cache does not have them.

    By the names of Executor.read_pages, each [kv_heads, tokens, …]. Layers with a window have only the last
    whole pages: those that a row after `tokens` reads. Of states the one behind `tokens`, [heads, depth, …].
    """
    table = core.scheduler.table
    epoch = core.epoch
    sequence = await _resident(core, tokens)
    try:
        content: dict[str, Array] = {}
        for group, layout in enumerate(await core.on_device(_layouts(core))):
            pages = sequence.held[group].pages
            whole = {
                n: np.empty((page.shape[1], len(pages) * page.shape[2], page.shape[3]), page.dtype)
                for n, page in layout.items()
            }
            step = _pages_at_once(layout)
            for start in range(0, len(pages), step):
                await core.on_device(_reader(core, group, pages[start : start + step], whole, start))
                _check_epoch(core, epoch)
            content |= whole
        return content
    finally:
        table.release(sequence)
        core.wake()


async def restore(core: EngineCore, tokens: Seq[int], tensors: Mapping[str, Array]) -> None:
    """Make `tokens` a prefix in the cache, with keys and values as `capture` returned them.

    Afterwards it is an ordinary prefix that no request holds, the last to be evicted. SnapshotError if it
    does not fit.
    """
    table = core.scheduler.table
    size, saved = table.page_size, len(tokens)
    layouts = await core.on_device(_layouts(core))
    tokens = tokens[: saved // size * size]
    needed = [saved - window.first_column(len(tokens)) * size for window in table.windows]
    if saved % size and any(window.stride for window in table.windows):
        raise SnapshotError(
            f"the snapshot has the states behind {saved} tokens, but this engine needs a multiple of its "
            f"page size, {size}: save it again with this engine"
        )
    head_dim = head_dim_of(core.manifest)
    await asyncio.to_thread(check_layout, layouts, tensors, saved, needed, head_dim)
    _check_room(core, len(tokens))
    epoch = core.epoch
    sequence = table.borrow(tokens)
    try:
        table.slide(sequence, len(tokens))
        _reserve(core, sequence, len(tokens))
        step = min(map(_pages_at_once, layouts))
        for column in range(len(sequence.tokens) // size, len(tokens) // size, step):
            until = min(column + step, len(tokens) // size)
            for group, layout in enumerate(layouts):
                first = max(column, sequence.held[group].first)
                if table.windows[group].stride:
                    if until * size == len(tokens):
                        await core.on_device(_state_writer(core, sequence, group, tensors, layout))
                        _check_epoch(core, epoch)
                elif first < until:
                    await core.on_device(_writer(core, sequence, group, first, until, layout, tensors, saved))
                    _check_epoch(core, epoch)
            table.append(sequence, tokens[column * size : until * size])
            if until * size == len(tokens):
                table.keep(sequence)
            table.publish(sequence, len(sequence.tokens))
    finally:
        table.release(sequence)
        core.wake()


def check_layout(
    layouts: Seq[Mapping[str, Array]],
    tensors: Mapping[str, Array],
    tokens: int,
    needed: Seq[int],
    head_dim: int,
) -> None:
    """Check that keys and values of `tokens` tokens fit a cache whose pages look like `layouts`, one for each
    group.

    `needed`: the last tokens that each group needs; a file may have more. SnapshotError if they do not fit.
    """
    again = "save it again with the same model and the same quantization of the cache (--kv-bits)"
    flat = [name for name, given in tensors.items() if given.ndim != 3]
    if flat:
        raise SnapshotError(
            f"the snapshot's {flat[0]} is {list(tensors[flat[0]].shape)}, not a shape of keys or values: "
            f"{again}"
        )
    every = {name: page for layout in layouts for name, page in layout.items()}
    theirs, ours = kind(tensors, head_dim), kind(every, head_dim)
    if tensors.keys() != every.keys() or quantized_bits(tensors, head_dim) != quantized_bits(every, head_dim):
        raise SnapshotError(
            f"the snapshot holds {theirs} keys and values of {_layers(tensors)} layers, this cache {ours} "
            f"ones of {_layers(every)} layers: {again}"
        )
    for layout, least in zip(layouts, needed, strict=True):
        for name, page in layout.items():
            _check_shape(name, tensors[name].shape, page.shape, least, tokens)
            _check_values(name, tensors[name], page, theirs, ours)


def _check_shape(name: str, given: tuple[int, ...], page: tuple[int, ...], least: int, tokens: int) -> None:
    """Check a shape [kv_heads, tokens, width]: all tokens, or at least the last `least` that this cache
    needs.
    """
    if name.endswith(STATES):
        least = tokens = page[2]
    if (given[0], given[2]) != (page[1], page[3]) or not least <= given[1] <= tokens:
        wanted = [page[1], tokens, page[3]]
        last = f" or the last {least} of the tokens" if least < tokens else ""
        raise SnapshotError(
            f"the snapshot's {name} is {list(given)}, this cache needs {wanted}{last}: save it again with "
            "the same model, here or where pages have as many tokens"
        )


def _check_values(name: str, given: Array, page: Array, theirs: str, ours: str) -> None:
    if given.dtype.kind == "f" and not np.isfinite(given).all():
        raise SnapshotError(
            f"the snapshot's {name} has values that are not numbers: the device that saved it computed "
            "nonsense, or the file was altered. Save it again"
        )
    if given.dtype == page.dtype:
        return
    if (given.dtype.name, page.dtype.name) != ("float32", "float16"):
        raise SnapshotError(
            f"the snapshot was saved from a {theirs} cache, this one is {ours}: answers would not be those "
            f"that this device computes. Save it again here, or where the cache is {page.dtype}"
        )
    if np.abs(given).max(initial=0) > np.finfo(np.float16).max:
        raise SnapshotError(
            f"the snapshot's {name} has values that float16, the type of this cache, cannot hold"
        )


def kind(content: Mapping[str, Array], head_dim: int) -> str:
    """Describe the type in which a cache stores its values."""
    bits = quantized_bits(content, head_dim)
    return f"{kv_dtype(content)}, {bits}-bit" if bits else kv_dtype(content)


def kv_dtype(content: Mapping[str, Array]) -> str:
    """The type of keys and values, or of scales and biases if they are quantized."""
    others = (".codes", STATES, TAKEN)
    return next((str(array.dtype) for name, array in content.items() if not name.endswith(others)), "no")


def head_dim_of(manifest: Manifest) -> int:
    """Values of a head in the first cache of keys and values; 0 if there is none."""
    return next((cache.head_dim for cache in manifest.caches if cache.parts == "kv"), 0)


def quantized_bits(content: Mapping[str, Array], head_dim: int) -> int | None:
    """Bits of the codes of a quantized cache; None if it is not quantized."""
    codes = next((array for name, array in content.items() if name.endswith(".k.codes")), None)
    return None if codes is None else codes.shape[-1] * 32 // head_dim


def _layers(content: Mapping[str, Array]) -> int:
    return len({name.split(".")[1] for name in content if name.startswith("kv.")})


def _check_epoch(core: EngineCore, epoch: int) -> None:
    """Raise DeviceLost if the engine's epoch has ended: pages written or found in it have lost
    their content.
    """
    if core.epoch != epoch:
        raise DeviceLost(
            "the device failed or was lost while a snapshot was being copied: save or load it again"
        )


def _check_room(core: EngineCore, tokens: int) -> None:
    """Raise SnapshotError for a prefix that no prompt of this engine could use."""
    if tokens >= core.context:
        raise SnapshotError(
            f"the snapshot has {tokens} tokens, but only {core.context} fit the context here, the answer "
            "included: give the cache more memory (kv_memory, --kv-memory) if the model allows it"
        )


async def _resident(core: EngineCore, tokens: Seq[int]) -> Sequence:
    """A held sequence with all of `tokens` in the cache, computed if needed."""
    table = core.scheduler.table
    for _ in range(ATTEMPTS):
        sequence = table.borrow(tokens)
        if len(sequence.tokens) == len(tokens):
            return sequence
        table.release(sequence)
        async for _event in core.generate(
            tokens, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        ):
            pass
    raise DeviceError(
        f"other requests push the prefix of {len(tokens)} tokens out of the cache before it can be saved: "
        "save it while fewer are running, or give the cache more memory (kv_memory, --kv-memory)"
    )


def _reserve(core: EngineCore, sequence: Sequence, length: int) -> None:
    """Reserve pages for the prefix up to `length`; SnapshotError if running requests leave too few."""
    table = core.scheduler.table
    if table.reserve(sequence, length) is not None:
        return
    pairs = zip(table.windows, sequence.held, strict=True)
    missing = [window.columns(length) - held.end for window, held in pairs]
    short = max(range(len(missing)), key=lambda group: missing[group] - table.available_in(group))
    raise SnapshotError(
        f"the snapshot needs {missing[short]} pages of the cache, but running requests leave only "
        f"{table.available_in(short)} of {table.allocators[short].count}: load it before them, or give the "
        "cache more memory (kv_memory, --kv-memory)"
    )


def _layouts(core: EngineCore) -> Callable[[], list[dict[str, Array]]]:
    """A call that reads a page of each group, to learn shapes and dtypes of pages."""
    return lambda: [core.executor.read_pages(group, [0]) for group in range(len(core.manifest.groups))]


def _pages_at_once(layout: Mapping[str, Array]) -> int:
    return max(1, CHUNK_BYTES // max(sum(page.nbytes // len(page) for page in layout.values()), 1))


def _reader(
    core: EngineCore, group: int, pages: Seq[int], whole: Mapping[str, Array], start: int
) -> Callable[[], None]:
    """A call that copies pages to `whole`, from its page `start` on."""

    def read() -> None:
        for name, content in core.executor.read_pages(group, pages).items():
            count, heads, size, width = content.shape
            whole[name][:, start * size : (start + count) * size] = content.swapaxes(0, 1).reshape(
                heads, count * size, width
            )

    return read


def _state_writer(
    core: EngineCore,
    sequence: Sequence,
    group: int,
    tensors: Mapping[str, Array],
    layout: Mapping[str, Array],
) -> Callable[[], None]:
    """A call that writes the states of a group behind the last token."""
    content = {name: np.ascontiguousarray(tensors[name][None], dtype=layout[name].dtype) for name in layout}
    return lambda: core.executor.write_pages(group, sequence.held[group].pages[-1:], content)


def _writer(
    core: EngineCore,
    sequence: Sequence,
    group: int,
    first: int,
    until: int,
    layout: Mapping[str, Array],
    tensors: Mapping[str, Array],
    saved: int,
) -> Callable[[], None]:
    """A call that writes columns `first` to `until` of a group from `tensors`, which have the last of `saved`
    tokens.

    Values are rounded to the cache's dtype.
    """
    held = sequence.held[group]
    pages = held.pages[first - held.first : until - held.first]

    def write() -> None:
        content = {}
        for name, page in layout.items():
            _, heads, size, width = page.shape
            start = first * size - (saved - tensors[name].shape[1])
            part = tensors[name][:, start : start + len(pages) * size].reshape(heads, len(pages), size, width)
            content[name] = np.ascontiguousarray(part.swapaxes(0, 1), dtype=page.dtype)
        core.executor.write_pages(group, pages, content)

    return write
