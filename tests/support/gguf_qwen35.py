"""Tensors and metadata of Qwen 3.5 in GGUF files, as llama.cpp's conversion/qwen.py makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

Array = np.ndarray[Any, Any]
NAMES = ("qwen35", "qwen35moe")
ARCHITECTURES = {"qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"}


def _tiled(rows: Array, heads: int, shared: int) -> Array:
    """Rows of `heads` heads of values, of which neighbours share a head of keys, in the order of files: heads
    of values are tiled over the `shared` heads of keys.
    """
    by_head = rows.reshape(shared, heads // shared, -1, *rows.shape[1:])
    return by_head.swapaxes(0, 1).reshape(rows.shape)


def stored(name: str, value: Array, config: Mapping[str, Any]) -> tuple[str, Array]:
    """The name, for the map of names, and the values that a tensor has in a file."""
    shared, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    keys = 2 * shared * config["linear_key_head_dim"]
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return name, value + np.float32(1)
    part = name.rpartition(".linear_attn.")[2]
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        value = value[:, 0] if value.ndim == 3 else value
        value = np.concatenate([value[:keys], _tiled(value[keys:], heads, shared)])
    elif part in ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
        value = _tiled(value, heads, shared)
    elif part == "out_proj.weight":
        value = _tiled(value.T, heads, shared).T
    if part == "A_log":
        value = -np.exp(value)
    return name.replace(".dt_bias", ".dt_proj.bias"), np.ascontiguousarray(value)


def metadata(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """The sizes of the linear attention, which layers have it, and the sections of the rotation."""
    heads, types = config["linear_num_value_heads"], config["layer_types"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * heads)
    recurrent = [kind == "linear_attention" for kind in types]
    if recurrent != [
        (i + 1) % 4 != 0 for i in range(len(types))
    ]:  # earlier converters know the interval alone
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
    writer.add_full_attention_interval(4)
    sections = (config.get("rope_parameters") or {}).get("mrope_section", [11, 11, 10])
    writer.add_rope_dimension_sections([*sections, 0])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
