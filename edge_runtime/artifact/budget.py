"""Memory of the KV cache: sizes of pages, and how many pages a budget pays for."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence

from nearfar.edge_runtime.cache import Window
from nearfar.errors import DeviceError, RequestError
from nearfar.format.buffers import sized, stored
from nearfar.format.consistency import DTYPE_BYTES
from nearfar.format.kv import BITS, group_size, row_words
from nearfar.format.manifest import KvCache, Manifest, Program
from nearfar.format.sizes import MAX_STEP, pages_for
from nearfar.memory import host_memory

TYPICAL = 4096
"""Tokens that most conversations stay below, although the context allows longer ones."""

BESIDE_A_PART = 8
"""Part of the free memory that the cache takes if the weights take the rest and more: an eighth."""

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def parse_size(size: float | str, param: str = "kv_memory") -> int:
    """Parse "512MB", "1.5 GiB" or a whole number into bytes; RequestError names `param` for anything else."""
    if (isinstance(size, int) and not isinstance(size, bool)) or (
        isinstance(size, float) and size.is_integer()
    ):
        if size <= 0:
            raise RequestError(f"{param} must be positive, not {size}", param)
        return int(size)
    if not isinstance(size, str):
        raise RequestError(
            f"{param} must be a number of bytes or a size such as 512MB, not {size!r:.80}", param
        )
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", size.lower())
    if not found or not 0 < float(found[1]) < 1e15:
        raise RequestError(f"{param} must be a size such as 512MB or 2GiB, not {size!r:.80}", param)
    return int(float(found[1]) * _UNITS[found[2] or ""])


def show_size(size: int) -> str:
    """Format bytes for a person: "1.5 GB"."""
    size = min(size, 10**24)  # a larger number cannot be a size
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} bytes"


def kv_group(head_dim: int, bits: int) -> int:
    """Values of a head that share a scale in a cache of `bits` bits. RequestError where heads cannot be cut
    into groups.
    """
    group = group_size(head_dim, bits)
    if group is None:
        raise RequestError(
            f"kv_bits {bits}: heads of {head_dim} values cannot be cut into groups of 32, so this model's "
            "cache cannot be quantized. Leave kv_bits (--kv-bits) out",
            "kv_bits",
        )
    return group


def page_bytes(manifest: Manifest, program: Program, kv_bits: int | None = None) -> tuple[int, ...]:
    """Bytes of a page of each group: of all caches in the group."""
    each = [0] * len(manifest.groups)
    for cache in manifest.caches:
        each[cache.group] += cache_page_bytes(manifest, cache, program.kv_dtype, kv_bits)
    return tuple(each)


def kv_bytes(manifest: Manifest, program: Program, tokens: int, kv_bits: int | None = None) -> int:
    """Bytes of the pages that one sequence of `tokens` tokens needs: also its windows and states while its
    prompt is computed in the largest steps.
    """
    each = page_bytes(manifest, program, kv_bits)
    return sum(
        size * window.most_columns(MAX_STEP, tokens)
        for size, window in zip(each, windows(manifest), strict=True)
    )


def windows(manifest: Manifest) -> tuple[Window, ...]:
    """The attention window of each group of caches."""
    return tuple(Window(group.window, manifest.cache.page_size, group.stride) for group in manifest.groups)


def cache_page_bytes(manifest: Manifest, cache: KvCache, dtype: str, kv_bits: int | None = None) -> int:
    """Bytes of a cache in one page of its group: of positions, or of a state, which is float32."""
    if cache.parts == "state":
        return DTYPE_BYTES["float32"] * cache.kv_heads * cache.depth * cache.head_dim
    return cache_bytes(cache, dtype, kv_bits) * manifest.cache.page_size


def cache_bytes(cache: KvCache, dtype: str, kv_bits: int | None = None) -> int:
    """Bytes of one token's keys and values in a cache of `dtype`; with `kv_bits`, codes, scales
    and biases. A cache of one tensor is float32.
    """
    if cache.parts == "k":
        return DTYPE_BYTES["float32"] * cache.kv_heads * cache.head_dim
    if dtype in BITS:
        return 2 * cache.kv_heads * row_words(cache.head_dim, dtype) * DTYPE_BYTES["uint32"]
    value, values = DTYPE_BYTES[dtype], 2 * cache.kv_heads * cache.head_dim
    if kv_bits is None:
        return value * values
    group = kv_group(cache.head_dim, kv_bits)
    return values // group * (kv_bits * group // 8 + 2 * value)


def useful_pages(manifest: Manifest) -> tuple[int, ...]:
    """Pages by group beyond which more memory would stay unused.

    A group without a window can use the full context in every slot. A group with a window can use twice its
    windows in all slots: half for running sequences, half for cached prefixes that no request uses at the
    moment.
    """
    most, slots = _most_columns(manifest), manifest.cache.slots
    whole = slots * pages_for(manifest.model.context_length, manifest.cache.page_size)
    sizes = [group.window for group in manifest.groups]
    return tuple(
        whole if size is None else min(2 * slots * n, whole) for size, n in zip(sizes, most, strict=True)
    )


def share_pages(
    manifest: Manifest, each: Sequence[int], budget: int, limits: Sequence[int]
) -> tuple[int, ...]:
    """Divide `budget` bytes into pages by group, at most `limits`; a page of group g takes
    `each[g]` bytes.

    A window must not shorten the context. So the first pages go to one sequence as long as the model or the
    budget allows, with its windows. Further sequences get their windows, and the pages of TYPICAL tokens in
    the group without a window, until all slots have them; then cached prefixes get as much again, so that all
    groups run out together. The remaining budget goes to the first group, which has no window, or the widest.
    """
    size, most = manifest.cache.page_size, _most_columns(manifest)
    context = manifest.model.context_length
    typical = pages_for(min(TYPICAL, context), size)

    def of(sequences: int, columns: int) -> list[int]:
        whole = columns + (sequences - 1) * typical
        wanted = [
            whole if window.size is None else sequences * min(n, columns)
            for window, n in zip(windows(manifest), most, strict=True)
        ]
        return list(map(min, wanted, limits))

    def takes(pages: Sequence[int]) -> int:
        return sum(count * page for count, page in zip(pages, each, strict=True))

    columns = _largest(pages_for(context, size), lambda n: takes(of(1, n)) <= budget)
    sequences = _largest(2 * manifest.cache.slots, lambda n: takes(of(n, columns)) <= budget)
    pages = of(max(sequences, 1), columns)
    pages[0] = min(pages[0] + max(budget - takes(pages), 0) // each[0], limits[0])
    return tuple(pages)


def _most_columns(manifest: Manifest) -> list[int]:
    """The most pages that one sequence can need, by group."""
    return [window.most_columns(MAX_STEP, manifest.model.context_length) for window in windows(manifest)]


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` for which `fits` is true; 0 if there is none. If a number fits, every
    smaller one must, too.
    """
    return bisect_left(range(1, most + 1), True, key=lambda n: not fits(n))


def longest(manifest: Manifest, pages: Sequence[int]) -> int:
    """Positions of the longest sequence that `pages` pages by group can hold."""
    context = manifest.model.context_length
    pools = zip(windows(manifest), pages, strict=True)
    return min(window.longest(count, MAX_STEP, context) for window, count in pools)


def check_buffers(
    manifest: Manifest, program: Program, pages: Sequence[int], context: int, memory: int | None = None
) -> None:
    """Raise DeviceError for a buffer larger than all memory, before anything is allocated.

    `memory`: see plan_pages.
    """
    total = max(memory or 0, host_memory().total)
    for buffer in manifest.buffers:
        dtype, shape = stored(buffer, program.kv_dtype)
        size = DTYPE_BYTES[dtype] * math.prod(sized(shape, context, pages))
        if not 0 <= size <= total:
            raise DeviceError(
                f"the buffer {buffer.name} of {manifest.model.name} takes {show_size(size)}, more than there "
                f"is memory ({show_size(total)}). It grows with the model's context of "
                f"{manifest.model.context_length:,} tokens: if that is not true, correct "
                "max_position_embeddings in the checkpoint's config.json and build the artifact again"
            )


def plan_pages(
    manifest: Manifest,
    program: Program,
    kv_memory: float | str | None,
    largest_buffer: int | None = None,
    kv_bits: int | None = None,
    memory: int | None = None,
) -> tuple[int, ...]:
    """The number of pages of each group of the cache: within `kv_memory`, or half of the memory that the
    weights leave.

    `largest_buffer`: the most bytes that a buffer of the device can have. `kv_bits`: bits that the device
    quantizes the cache to. `memory`: free bytes of a device that has its own memory. DeviceError where the
    budget is too small for a page, or larger than the memory.
    """
    each = page_bytes(manifest, program, kv_bits)
    host = host_memory()
    there, total = (host.available, host.total) if memory is None else (memory, memory)
    free = there - (manifest.weights.bytes if kv_memory is None else 0)
    if kv_memory is not None:
        budget = parse_size(kv_memory)
    elif free < 0 and memory is None:
        budget = there // BESIDE_A_PART  # weights that are larger than memory are in it in part
    else:
        budget = max(free, 0) // 2
    limits = useful_pages(manifest)
    if largest_buffer is not None:
        room = [largest_buffer // size for size in _buffer_pages(manifest, program)]
        limits = tuple(map(min, limits, room))
    pages = share_pages(manifest, each, budget, limits)
    if min(pages) < 1:
        context = manifest.model.context_length
        raise DeviceError(
            f"{show_size(budget)} for the KV cache is too little: one page of {manifest.cache.page_size} "
            f"tokens takes {show_size(sum(each))}, the full context of {context} tokens "
            f"{show_size(kv_bytes(manifest, program, context, kv_bits))}. Give it more with kv_memory "
            "(--kv-memory)"
        )
    if kv_memory is not None and budget > total:
        what = "this machine has" if memory is None else "the device can give"
        raise DeviceError(
            f"{show_size(budget)} for the KV cache is more than {what} ({show_size(total)}); "
            f"{show_size(max(free, 0))} are free"
        )
    return pages


def _buffer_pages(manifest: Manifest, program: Program) -> list[int]:
    """Bytes of a page in the largest buffer of each group; a buffer has the keys, the values, the one tensor
    or the states of one cache.
    """
    sizes = [0] * len(manifest.groups)
    for cache in manifest.caches:
        size = cache_page_bytes(manifest, cache, program.kv_dtype) // (2 if cache.parts == "kv" else 1)
        sizes[cache.group] = max(sizes[cache.group], size)
    return sizes
