"""Converts the keys of architectures with Mamba-2 layers: Granite 4 h, Nemotron-H and Falcon-H1.

The keys are those of llama.cpp's `conversion/granite.py`, `nemotron.py`, `falcon_h1.py` and `mamba.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nearfar.build.weights.gguf.facts import Facts

BY_LAYER = ("attention.head_count_kv", "feed_forward_length")
"""Keys with a number for each layer, 0 where the layer has no such part."""


@dataclass(frozen=True)
class _Mixer:
    """The sizes of a file's Mamba-2 layers, and the first of these layers."""

    heads: int
    inner: int
    groups: int
    depth: int
    taps: int
    first: int


def keys(given: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each list of sizes by layer by its largest size; the list itself is kept as `<key>.each`."""
    out = dict(given)
    for key in BY_LAYER:
        if isinstance(out.get(key), list) and out[key]:
            out[f"{key}.each"], out[key] = out[key], max(out[key])
    return out


def granite_hybrid(facts: Facts, multipliers: Callable[[Facts], None]) -> None:
    """Granite 4 h, with experts or without. `multipliers` reads Granite's four."""
    read, config = facts.read, facts.config
    config["num_local_experts"] = 0
    if read.size("expert_count", 0, least=0):
        facts.experts("num_local_experts")
    else:
        read.given("expert_used_count")
    types = _types(facts, ("mamba", "attention"))
    mixer = _mixer(facts, types)
    hidden = config["hidden_size"]
    if mixer.inner % hidden:
        read.refuse("ssm.inner_size", f"a multiple of embedding_length, which is {hidden:,}")
    turning = read.flag("rope.scaling.finetuned", True)
    inner = read.size("expert_shared_feed_forward_length", config["intermediate_size"])
    attending = types.index("attention") if "attention" in types else 0
    config |= _mamba_keys(facts, mixer) | {
        "model_type": "granitemoehybrid",
        "layer_types": types,
        "position_embedding_type": "rope" if turning else "nope",
        "shared_intermediate_size": inner,
        "shared_mlp_apart": True,
        "mamba_expand": mixer.inner // hidden,
        "attention_bias": facts.has("attn_q.bias", attending),
    }
    multipliers(facts)


def nemotron_h(facts: Facts) -> None:
    """Nemotron-H, with experts or without. Its files do not give the least dt, for which llama.cpp has no
    bound.
    """
    config = facts.config
    sparse = config["model_type"] == "nemotron_h_moe"
    types = _types(facts, ("mamba", "attention", "mlp"))
    routed = [facts.has("ffn_gate_inp.weight", layer) for layer in range(len(types))]
    types = ["moe" if routes else kind for kind, routes in zip(types, routed, strict=True)]
    mixer = _mixer(facts, types)
    facts.read.given("attention.layer_norm_epsilon")  # only the layers of experts read it
    bias = facts.has("ssm_in.bias", mixer.first)
    config |= {
        "model_type": "nemotron_h", "layers_block_type": types, "layer_norm_epsilon": config["rms_norm_eps"],
        "mamba_num_heads": mixer.heads, "mamba_head_dim": mixer.inner // mixer.heads,
        "ssm_state_size": mixer.depth, "n_groups": mixer.groups, "conv_kernel": mixer.taps,
        "use_conv_bias": facts.has("ssm_conv1d.bias", mixer.first), "use_bias": bias,
        "mlp_bias": facts.has("ffn_up.bias", types.index("mlp") if "mlp" in types else 0),
        "time_step_min": 0.0,
    }  # fmt: skip
    if sparse:
        _nemotron_experts(facts, types.index("moe") if "moe" in types else 0)


def _nemotron_experts(facts: Facts, first: int) -> None:
    """The experts of a Nemotron. `first`: the first layer that has some."""
    read, config = facts.read, facts.config
    facts.experts("n_routed_experts", "moe_intermediate_size")
    groups = read.size("expert_group_count", 1)
    config |= {
        "moe_shared_expert_intermediate_size": read.size("expert_shared_feed_forward_length"),
        "norm_topk_prob": read.flag("expert_weights_norm"),
        "routed_scaling_factor": read.number("expert_weights_scale", 1.0, 1e-6, 1e6),
        "n_group": groups, "topk_group": read.size("expert_group_used_count", groups),
        "moe_latent_size": read.size("moe_latent_size") if read.given("moe_latent_size") else None,
        "mlp_bias": facts.has("ffn_up_shexp.bias", first),
    }  # fmt: skip
    if read.size("expert_shared_count", 1) != 1:
        read.refuse("expert_shared_count", "1")
    if read.size("expert_gating_func", 2) != 2:
        read.refuse("expert_gating_func", "2, a sigmoid")


def falcon_h1(facts: Facts) -> None:
    """Falcon-H1, whose multipliers are in the tensors already."""
    config, mixer = facts.config, _mixer(facts, ["mamba"])
    config |= _mamba_keys(facts, mixer) | {
        "model_type": "falcon_h1",
        "mamba_d_ssm": mixer.inner,
        "mamba_rms_norm": facts.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": facts.has("ssm_out.bias"),
        "attention_bias": facts.has("attn_q.bias"),
        "mlp_bias": facts.has("ffn_gate.bias"),
    }


def _types(facts: Facts, kinds: tuple[str, ...]) -> list[str]:
    """The type of each layer: attention where it has heads of keys, an MLP where it has an MLP's width."""
    read, layers = facts.read, facts.config["num_hidden_layers"]

    def each(key: str) -> list[int]:
        read.given(f"{key}.each")
        found = read.config.get(f"{key}.each", [read.config.get(key, 0)] * layers)
        if len(found) != layers or not all(type(item) is int and item >= 0 for item in found):
            read.refuse(key, f"a number for each of {layers} layers")
        return list(found)

    heads = each(BY_LAYER[0])
    inner = each(BY_LAYER[1]) if "mlp" in kinds else [0] * layers
    return [kinds[1] if h else kinds[-1] if n else kinds[0] for h, n in zip(heads, inner, strict=True)]


def _mixer(facts: Facts, types: list[str]) -> _Mixer:
    size = {
        key: facts.read.size(f"ssm.{key}")
        for key in ("time_step_rank", "inner_size", "group_count", "state_size", "conv_kernel")
    }
    heads, inner = size["time_step_rank"], size["inner_size"]
    if inner % heads:
        facts.read.refuse("ssm.inner_size", f"a multiple of ssm.time_step_rank, which is {heads}")
    first = types.index("mamba") if "mamba" in types else 0
    return _Mixer(heads, inner, size["group_count"], size["state_size"], size["conv_kernel"], first)


def _mamba_keys(facts: Facts, mixer: _Mixer) -> dict[str, Any]:
    """The keys of Mamba-2 layers as Granite and Falcon have them."""
    return {
        "mamba_n_heads": mixer.heads, "mamba_d_head": mixer.inner // mixer.heads,
        "mamba_n_groups": mixer.groups, "mamba_d_state": mixer.depth, "mamba_d_conv": mixer.taps,
        "mamba_conv_bias": facts.has("ssm_conv1d.bias", mixer.first),
        "mamba_proj_bias": facts.has("ssm_in.bias", mixer.first),
    }  # fmt: skip
