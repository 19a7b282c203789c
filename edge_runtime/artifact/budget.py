"""How much memory the KV cache gets."""

from __future__ import annotations

import math
import re

import psutil

from nearfar.errors import DeviceError, RequestError
from nearfar.format import buffers as extents
from nearfar.format.manifest import KvCache, Manifest, Program

_BYTES = {"float16": 2, "float32": 4, "int32": 4, "uint32": 4}
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(size: int | str) -> int:
    """Bytes of "512MB", "1.5 GiB" or a plain number."""
    if isinstance(size, int):
        if size <= 0:
            raise RequestError(f"kv_memory must be positive, not {size}", "kv_memory")
        return size
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", size.lower())
    if not found or not 0 < float(found[1]) < 1e15:
        raise RequestError(f"kv_memory must be a size such as 512MB or 2GiB, not {size!r}", "kv_memory")
    return int(float(found[1]) * _UNITS[found[2] or ""])


def show_size(size: int) -> str:
    """Bytes as a person reads them."""
    size = min(size, 10**24)  # beyond, it was never a size
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} bytes"


def kv_group(head_dim: int, bits: int) -> int:
    """Values that share a scale in a cache of `bits` bits; 4 bits need the smaller groups."""
    if head_dim % 32:
        raise RequestError(
            f"kv_bits {bits}: heads of {head_dim} values cannot be cut into groups of 32, so this model's cache cannot be "
            "quantized. Leave kv_bits (--kv-bits) out",
            "kv_bits",
        )
    return 64 if bits == 8 and head_dim % 64 == 0 else 32


def page_bytes(manifest: Manifest, program: Program, kv_bits: int | None = None) -> int:
    """Bytes of one page of all layers; a quantized cache has a scale and a bias for each group."""
    return sum(cache_bytes(cache, program.kv_dtype, kv_bits) for cache in manifest.caches) * manifest.cache.page_size


def cache_bytes(cache: KvCache, dtype: str, kv_bits: int | None = None) -> int:
    """Bytes of one token's keys and values in a cache of `dtype`, quantized to `kv_bits` where that is given."""
    value, values = _BYTES[dtype], 2 * cache.kv_heads * cache.head_dim
    if kv_bits is None:
        return value * values
    group = kv_group(cache.head_dim, kv_bits)
    return values // group * (kv_bits * group // 8 + 2 * value)


def useful_pages(manifest: Manifest) -> int:
    """Pages beyond which memory would lie idle: every slot at the full context."""
    return manifest.cache.slots * -(-manifest.model.context_length // manifest.cache.page_size)


def check_buffers(manifest: Manifest, program: Program, pages: int, context: int, memory: int | None = None) -> None:
    """Refuse an artifact whose buffers no memory could hold, before it is tried. `memory`: see plan_pages."""
    symbols = {"context": context, **{extents.pages(group): pages for group in range(len(manifest.groups))}}
    total = psutil.virtual_memory().total if memory is None else max(memory, psutil.virtual_memory().total)
    for buffer in manifest.buffers:
        width = _BYTES.get(program.kv_dtype if buffer.dtype == "kv" else buffer.dtype, 4)
        size = width * math.prod(symbols.get(extent, 0) if isinstance(extent, str) else extent for extent in buffer.shape)
        if not 0 <= size <= total:
            raise DeviceError(
                f"the buffer {buffer.name} of {manifest.model.name} takes {show_size(size)}, more than there is memory "
                f"({show_size(total)}). It grows with the model's context of {manifest.model.context_length:,} tokens: if that is "
                "not true, correct max_position_embeddings in the checkpoint's config.json and build the artifact again"
            )


def plan_pages(
    manifest: Manifest,
    program: Program,
    kv_memory: int | str | None,
    max_pages: int | None = None,
    kv_bits: int | None = None,
    memory: int | None = None,
) -> int:
    """How many pages the cache gets: from the budget, else from half of the memory that is free.

    `max_pages` is a limit of the device, such as the size of a buffer. `kv_bits`: the cache is quantized. `memory`: bytes that
    the device has to give, where it has memory of its own.
    """
    each = page_bytes(manifest, program, kv_bits)
    host = psutil.virtual_memory()
    there, total = (host.available, host.total) if memory is None else (memory, memory)
    free = there - (manifest.weights.bytes if kv_memory is None else 0)
    budget = parse_size(kv_memory) if kv_memory is not None else max(free, 0) // 2
    pages = min(budget // each, useful_pages(manifest), max_pages or useful_pages(manifest))
    if pages < 1:
        context = manifest.model.context_length
        raise DeviceError(
            f"{show_size(budget)} for the KV cache is too little: one page of {manifest.cache.page_size} tokens takes "
            f"{show_size(each)}, the full context of {context} tokens "
            f"{show_size(each * -(-context // manifest.cache.page_size))}. Give it more with kv_memory (--kv-memory)"
        )
    if kv_memory is not None and budget > total:
        what = "this machine has" if memory is None else "the device can give"
        raise DeviceError(
            f"{show_size(budget)} for the KV cache is more than {what} ({show_size(total)}); {show_size(max(free, 0))} are free"
        )
    return pages
