"""Converts the keys of Qwen 3.5, dense and with experts, whose layers have a gated delta rule or attend.

The keys are those of llama.cpp's `conversion/qwen.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nearfar.build.weights.gguf.facts import Facts
from nearfar.step.config import MAX_LAYERS

NAMES = ("qwen35", "qwen35moe")
"""llama.cpp's names of the architectures."""
RECURRENT = "attention.recurrent_layers"
INTERVAL = 4
"""Every fourth layer attends where a file does not say which."""


def keys(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a file with a width of MLPs: only the experts' width is in files of models in which every
    layer has experts.
    """
    return {"feed_forward_length": given.get("expert_feed_forward_length"), **given}


def qwen35(facts: Facts) -> None:
    """Qwen 3.5. The heads of values of a file are tiled over those of keys, see ops.Delta."""
    read, config = facts.read, facts.config
    sparse = config["model_type"] == "qwen35moe"
    config["model_type"] = "qwen3_5_moe_text" if sparse else "qwen3_5_text"
    config.setdefault("partial_rotary_factor", 1.0)
    read.given("rope.dimension_sections")  # the three positions of an image, which are one in a text
    config["layer_types"] = _types(facts)
    heads, inner = read.size("ssm.time_step_rank"), read.size("ssm.inner_size")
    if inner % heads:
        read.refuse("ssm.inner_size", f"a multiple of ssm.time_step_rank, which is {heads}")
    config |= {
        "linear_num_key_heads": read.size("ssm.group_count"), "linear_num_value_heads": heads,
        "linear_key_head_dim": read.size("ssm.state_size"), "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": read.size("ssm.conv_kernel"), "linear_value_heads_tiled": True,
    }  # fmt: skip
    attending = (
        config["layer_types"].index("full_attention") if "full_attention" in config["layer_types"] else 0
    )
    config["attention_bias"] = facts.has("attn_q.bias", attending)
    if sparse:
        facts.experts("num_experts", "moe_intermediate_size")
        config["shared_expert_intermediate_size"] = read.size("expert_shared_feed_forward_length")


def _types(facts: Facts) -> list[str]:
    """The type of each layer: from a list of the recurrent ones, or by the interval of those that attend."""
    read, layers = facts.read, facts.config["num_hidden_layers"]
    every = read.size("full_attention_interval", INTERVAL, most=MAX_LAYERS)
    recurrent = [(i + 1) % every != 0 for i in range(layers)]
    if read.given(RECURRENT):
        found = read.config[RECURRENT]
        recurrent = [found] * layers if isinstance(found, bool) else found
        if len(recurrent) != layers or not all(isinstance(item, bool) for item in recurrent):
            read.refuse(RECURRENT, f"true or false for each of {layers} layers")
    return ["linear_attention" if each else "full_attention" for each in recurrent]
