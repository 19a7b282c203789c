"""Attention over the paged KV cache, with the signature that transformers' models call."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from nearfar.errors import CheckpointError
from nearfar.fallback_server.torch_engine.cache import (
    DecodeGroup,
    KVCache,
    LayerShape,
    PagedStep,
    PrefillRows,
)

NAME = "nearfar_paged"


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    paged_step: PagedStep | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Store keys and values of a flat batch of rows, then attend each row to its own sequence.

    query [1, heads, N, dim], key and value [1, kv_heads, N, dim]; returns [1, N, heads, dim]. Raises
    CheckpointError for variants of attention that it does not compute.
    """
    if paged_step is None:
        raise CheckpointError(
            f"{type(module).__name__} does not hand its keyword arguments on to the attention function"
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if others.get(name) is not None:
            raise CheckpointError(
                f"{type(module).__name__} attends with {name!r}, which the torch engine cannot do"
            )
    if paged_step.pulse is not None:
        paged_step.pulse()
    layer: int = module.layer_idx  # type: ignore[assignment]
    # each of shape [N, heads, dim]
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    if paged_step.shapes is not None:
        if layer in paged_step.shapes:
            raise CheckpointError(f"layer {layer} attends more than once, which the torch engine cannot do")
        paged_step.shapes[layer] = LayerShape(k.shape[1], k.shape[2], v.shape[2])
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    cache = paged_step.cache
    if cache is not None:
        assert paged_step.write is not None
        cache.write(layer, paged_step.write, k, v)
        for group in paged_step.decode:
            part = slice(group.start, group.stop)
            _decode(q[part], cache, layer, group, scaling, sliding_window, out[part])
    for rows in paged_step.prefill:
        out[rows.start : rows.stop] = _prefill(q, k, v, cache, layer, rows, scaling, sliding_window)
    return out[None], None


def _decode(
    q: torch.Tensor,
    cache: KVCache,
    layer: int,
    group: DecodeGroup,
    scaling: float | None,
    window: int | None,
    out: torch.Tensor,
) -> None:
    """Attend one row per sequence, [rows, heads, dim], with the native kernel, or by gathering the padded
    pages of all.

    In a gather, the query heads that share a key head are the query rows of dense attention.
    """
    if cache.decode is not None:
        cache.decode(
            q, cache.keys[layer], cache.values[layer], group.pages, group.lengths, scaling, window, out
        )
        return
    rows = group.stop - group.start
    keys, values = cache.gather(layer, group.pages.flatten())
    k = keys.view(rows, -1, *keys.shape[1:]).transpose(1, 2)
    v = values.view(rows, -1, *values.shape[1:]).transpose(1, 2)
    grouped = q.reshape(rows, k.shape[1], -1, q.shape[2])
    bias = group.bias(cache.page_size, window, q.dtype)
    out.copy_(scaled_dot_product_attention(grouped, k, v, attn_mask=bias, scale=scaling).reshape(out.shape))


def _prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: KVCache | None,
    layer: int,
    rows: PrefillRows,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attend consecutive rows of one sequence. From position 0 all keys are in the rows; else they come from
    the cache.
    """
    part = slice(rows.start, rows.stop)
    heads, count = q.shape[1], rows.stop - rows.start
    if rows.position == 0:
        keys, values = k[part], v[part]
    else:
        assert cache is not None
        keys, values = (found[: rows.length] for found in cache.gather(layer, rows.pages))
    keys, values, queries = (
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        q[part].transpose(0, 1)[None],
    )
    groups = heads // keys.shape[1]
    if rows.position == 0 and (window is None or count <= window):
        out = scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=scaling, enable_gqa=groups > 1
        )
        return out[0].transpose(0, 1)
    folded = queries.reshape(1, keys.shape[1], groups * count, -1)
    out = scaled_dot_product_attention(
        folded, keys, values, attn_mask=rows.mask(window, groups), scale=scaling
    )
    return out.reshape(heads, count, -1).transpose(0, 1)


AttentionInterface.register(NAME, paged_attention)
