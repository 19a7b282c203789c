"""The buffers that plans name besides weights and workspace: names, dtypes and shapes.

docs/artifact.md has the same table, generated from this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from nearfar.format import kv
from nearfar.format.manifest import Buffer, Cache, Dim, Group, KvCache
from nearfar.format.sampler import COLUMNS
from nearfar.format.sizes import MAX_ROWS, MAX_STEP, TOP_LOGPROBS, pages_for
from nearfar.step.shapes import Parts

KV = "kv"
"""Placeholder for the dtype of the cache's buffers, which the program's kv_dtype decides
(nearfar.format.kv).
"""
CONTEXT = "context"
"""Placeholder in shapes for the number of positions that the runtime has room for."""


@dataclass(frozen=True)
class Row:
    """A line of the table. `shape` has numbers, and words that `buffers` replaces."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    what: str


# fmt: off
TABLE = (
    Row("tokens", "int32", (MAX_STEP,), "token id of row m"),
    Row("positions", "int32", (MAX_STEP,),
        "its position in its sequence, from 0; −1: padding (nothing written, nothing attended)"),
    Row("slots", "int32", (MAX_STEP,), "the slot of its sequence, 0…slots−1 (0 for padding)"),
    Row("page_table.<g>", "int32", ("slots", "pages_per_slot"),
        "by slot and column, position / page_size: a page of group g"),
    Row("logit_rows", "int32", (MAX_ROWS,),
        "the row m whose logits row r holds (where r is not used, the last used row again; 0 without one)"),
    Row("rope.<name>", "float32", (CONTEXT, "head_dim"),
        "rotations by position, made by the runtime at load"),
    Row("logits", "float32", (MAX_ROWS, "vocab"), "out: of the rows that `logit_rows` names"),
    Row("embedding", "float32", (MAX_ROWS, "embedding"),
        "out, of models that give embeddings: of the rows that `logit_rows` names, not normalized"),
    Row("sample_f32", "float32", (MAX_ROWS, COLUMNS),
        "parameters of the sampler by row of logits; see below"),
    Row("sample_i32", "int32", (MAX_ROWS, COLUMNS), "more of them"),
    Row("logit_bias", "float32", ("slots", "vocab"), "added to the logits of the slot"),
    Row("counts", "int32", ("slots", "vocab"),
        "low 24 bits: times the answer has the token, the sampled one included; bit 24: the prompt has it"),
    Row("allowed", "uint32", ("slots", "vocab_words"),
        "bit v%32 of word v/32: token v may be sampled; all ones at first"),
    Row("sampled", "int32", (MAX_ROWS,),
        "out: the token of each row of logits; −1: none, no logit was finite"),
    Row("logprob", "float32", (MAX_ROWS,),
        "out: log-softmax of the raw logits at `sampled`; of no meaning where that is −1"),
    Row("top_ids", "int32", (MAX_ROWS, TOP_LOGPROBS),
        "out: the likeliest tokens, best first, the lowest id first on ties"),
    Row("top_logprobs", "float32", (MAX_ROWS, TOP_LOGPROBS), "out: their log probabilities"),
    Row("kv.<c>.k", KV, ("pages.<g>", "kv_heads", "page_size", "head_dim"),
        "keys of cache c, which is of group g"),
    Row("kv.<c>.v", KV, ("pages.<g>", "kv_heads", "page_size", "head_dim"), "its values"),
    Row("kv.<c>.x", "float32", ("pages.<g>", "kv_heads", "page_size", "head_dim"),
        "the rows of a cache that keeps one tensor"),
    Row("kv.<c>.s", "float32", ("pages.<g>", "kv_heads", "depth", "head_dim"),
        "the states of a cache that keeps states: one matrix a head in each page"),
)
# fmt: on

SAMPLER_BUFFERS = (
    "logits", "sample_f32", "sample_i32", "logit_bias", "counts", "allowed",
    "sampled", "tokens", "logprob", "top_ids", "top_logprobs",
)  # fmt: skip
"""The buffers that kernels of greedy, sample and logprobs can name."""
OF_LOGITS = tuple(name for name in SAMPLER_BUFFERS if name != "tokens")
"""The buffers that only artifacts with logits have."""


def page_table(group: int) -> str:
    """The name of the page table of a group."""
    return f"page_table.{group}"


def pages(group: int) -> str:
    """The word in shapes that stands for the number of pages of a group."""
    return f"pages.{group}"


def rope(name: str) -> str:
    """The name of the buffer that holds a table of rotations."""
    return f"rope.{name}"


def keys(cache: int) -> str:
    """The name of the buffer that holds the keys of a cache."""
    return f"kv.{cache}.k"


def is_keys(name: str) -> bool:
    """Whether a cache buffer, given by its name, holds keys."""
    return name.endswith(".k")


def values(cache: int) -> str:
    """The name of the buffer that holds the values of a cache."""
    return f"kv.{cache}.v"


def taken(cache: int) -> str:
    """The name of the buffer that holds the rows of a cache of one tensor."""
    return f"kv.{cache}.x"


def states(cache: int) -> str:
    """The name of the buffer that holds the states of a cache."""
    return f"kv.{cache}.s"


NAMES: dict[Parts, tuple[Callable[[int], str], ...]] = {
    "kv": (keys, values),
    "k": (taken,),
    "state": (states,),
}


def of_cache(cache: int, parts: Parts) -> tuple[str, ...]:
    """The names of the buffers of a cache that keeps `parts`."""
    return tuple(name(cache) for name in NAMES[parts])


def sized(shape: Sequence[Dim], context: int, counts: Sequence[int]) -> tuple[int, ...]:
    """A shape in numbers, for `context` positions and `counts[g]` pages in group g."""
    words = {CONTEXT: context, **{pages(group): count for group, count in enumerate(counts)}}
    return tuple(words[extent] if isinstance(extent, str) else extent for extent in shape)


def stored(buffer: Buffer, kv_dtype: str) -> tuple[str, tuple[Dim, ...]]:
    """The dtype and shape of a buffer in a program whose cache has dtype `kv_dtype`."""
    return kv.rows_of(buffer.shape, kv_dtype) if buffer.dtype == KV else (buffer.dtype, buffer.shape)


def buffers(
    vocab: int,
    context: int,
    cache: Cache,
    groups: tuple[Group, ...],
    caches: tuple[KvCache, ...],
    ropes: dict[str, int],
    embedding: int | None = None,
) -> tuple[Buffer, ...]:
    """Every buffer of an artifact. `context`: its longest context; `ropes`: head_dim by the name of a table.

    `embedding`: the width of the embeddings of a model that gives no logits, so that nothing is sampled.
    """
    words: dict[Dim, int] = {
        "slots": cache.slots,
        "pages_per_slot": pages_for(context, cache.page_size),
        "vocab": vocab,
        "vocab_words": -(-vocab // 32),
        "page_size": cache.page_size,
        "embedding": embedding or 0,
    }
    out: list[Buffer] = []
    left_out = ("embedding",) if embedding is None else OF_LOGITS
    for row in TABLE:
        if row.name in left_out:
            continue
        for name, more in _instances(row.name, groups, caches, ropes):
            shape = tuple(more.get(extent, words.get(extent, extent)) for extent in row.shape)
            out.append(Buffer(name, row.dtype, shape))
    return tuple(out)


def _instances(
    name: str, groups: tuple[Group, ...], caches: tuple[KvCache, ...], ropes: dict[str, int]
) -> Iterable[tuple[str, dict[Dim, Dim]]]:
    """The names of the buffers that a line of the table stands for, each with the sizes that its shape
    depends on.
    """
    if "<g>" in name:
        return ((name.replace("<g>", str(group)), {}) for group in range(len(groups)))
    if "<name>" in name:
        return ((name.replace("<name>", rope), {"head_dim": dim}) for rope, dim in ropes.items())
    if "<c>" not in name:
        return ((name, {}),)
    return (
        (
            name.replace("<c>", str(index)),
            {
                "pages.<g>": pages(cache.group), "kv_heads": cache.kv_heads, "head_dim": cache.head_dim,
                "depth": cache.depth,
            },
        )
        for index, cache in enumerate(caches)
        if name.replace("<c>", str(index)) in of_cache(index, cache.parts)
    )  # fmt: skip
