"""Converts the keys of architectures whose names or settings differ from transformers' in more than a word.

The keys, and what absent ones mean, are those of llama.cpp's `conversion/` and `src/models/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nearfar.build.weights.gguf.facts import WINDOW, Facts
from nearfar.step.config import MAX_CONTEXT
from nearfar.step.decoder import HEAD_DIMS
from nearfar.step.rope import FACTOR, THETA

CAP = (1e-3, 1e6)
BETA = (0.0, 1e3)
STILL = 1e20
"""A divisor of frequencies from which on a pair does not rotate."""


def mistral3(facts: Facts) -> None:
    """Ministral 3, whose queries grow with their position, and Mistral Small 3, which is a Mistral."""
    read, config = facts.read, facts.config
    log_multiplier = read.number("rope.scaling.yarn_log_multiplier", 0.0, *BETA)
    if not read.given("attention.temperature_scale"):
        config["model_type"], config["sliding_window"] = "mistral", None
        if log_multiplier:
            read.refuse("rope.scaling.yarn_log_multiplier", "0, without attention.temperature_scale")
        return
    scaling = config.pop("rope_scaling", None)
    if scaling is None or scaling["rope_type"] != "yarn":
        read.refuse("rope.scaling.type", "yarn, together with attention.temperature_scale")
    config["model_type"], config["sliding_window"] = "ministral3", None
    config["rope_parameters"] = {
        **scaling,
        "rope_theta": config["rope_theta"],
        "llama_4_scaling_beta": read.number("attention.temperature_scale", None, *BETA),
        **({"mscale": 1.0, "mscale_all_dim": log_multiplier} if log_multiplier else {}),
    }


def olmo2(facts: Facts) -> None:
    """OLMo 2, and OLMo 3, which has windows and is stretched only where there is none."""
    read, config = facts.read, facts.config
    if not read.given(WINDOW):
        return
    facts.window()
    config["model_type"], config["layer_types"] = "olmo3", facts.layer_types(4)
    theta, scaling = config["rope_theta"], config.pop("rope_scaling", None)
    local = read.number("rope.freq_base_swa", theta, *THETA)
    config["rope_parameters"] = {
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
        "full_attention": {**(scaling or {"rope_type": "default"}), "rope_theta": theta},
    }


def exaone4(facts: Facts) -> None:
    """EXAONE 4, whose layers without a window do not rotate where others have one."""
    read, config = facts.read, facts.config
    config["sliding_window"] = None
    if read.given(WINDOW):
        facts.window()
        config["layer_types"] = facts.layer_types(4)


def glm(facts: Facts) -> None:
    """GLM-4 and GLM-Edge, which llama.cpp calls chatglm, and GLM-4-0414."""
    facts.config["model_type"] = {"chatglm": "glm"}.get(facts.config["model_type"], "glm4")
    facts.config["attention_bias"] = facts.has("attn_q.bias")


def hunyuan(facts: Facts) -> None:
    """Hunyuan. The base of frequencies in its files already contains the constant `alpha`."""
    facts.config["model_type"] = "hunyuan_v1_dense"
    facts.config["attention_bias"] = facts.has("attn_q.bias")


def seed_oss(facts: Facts) -> None:
    """Seed-OSS, with or without biases."""
    config = facts.config
    config["attention_bias"], config["attention_out_bias"] = (
        facts.has(f"attn_{part}.bias") for part in ("q", "output")
    )
    config["mlp_bias"] = facts.has("ffn_gate.bias")


def arcee(facts: Facts) -> None:
    """AFM, with or without biases."""
    facts.config["attention_bias"] = facts.has("attn_q.bias")
    facts.config["mlp_bias"] = facts.has("ffn_up.bias")


def seeing(facts: Facts) -> None:
    """The text model of Qwen 2-VL, 2.5-VL and 3-VL."""
    facts.config["model_type"] = {"qwen2vl": "qwen2", "qwen3vl": "qwen3"}[facts.config["model_type"]]
    _of_images(facts)


def seeing_experts(facts: Facts) -> None:
    """The text model of Qwen 3-VL with experts."""
    facts.config["model_type"] = "qwen3moe"
    _of_images(facts)
    qwen_moe(facts)


def _of_images(facts: Facts) -> None:
    """Settings of images, which do not change a text."""
    facts.read.given("rope.dimension_sections")
    facts.read.given("n_deepstack_layers")


def olmoe(facts: Facts) -> None:
    """OLMoE, whose weights of experts do not add up to 1."""
    facts.experts("num_experts")
    facts.config["norm_topk_prob"] = False


def qwen_moe(facts: Facts) -> None:
    """Qwen 1.5, 2 and 3 with experts. Files do not say whether the weights of experts add up to 1: those of
    Qwen 3 do.
    """
    config = facts.config
    qwen3 = config["model_type"] == "qwen3moe"
    config["model_type"] = "qwen3_moe" if qwen3 else "qwen2_moe"
    facts.experts("num_experts", "moe_intermediate_size")
    config["norm_topk_prob"] = qwen3
    layers = range(config["num_hidden_layers"])
    config["mlp_only_layers"] = [i for i in layers if not facts.has("ffn_gate_exps.weight", i)]
    if not qwen3:
        config["qkv_bias"] = facts.has("attn_q.bias")
        config["shared_expert_intermediate_size"] = facts.read.size(
            "expert_shared_feed_forward_length", config["intermediate_size"]
        )


def gpt_oss(facts: Facts) -> None:
    """gpt-oss, whose rotations are stretched between exact borders."""
    facts.config["model_type"] = "gpt_oss"
    facts.experts("num_local_experts")
    facts.window()
    facts.config["attention_bias"] = facts.has("attn_q.bias")
    scaling = facts.config.get("rope_scaling")
    facts.config["rope_scaling"] = {**scaling, "truncate": False} if scaling else {"rope_type": "default"}


def lfm2_keys(given: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the list of key heads by layer of an LFM2 file by one number; `lfm2` reads the list."""
    heads = given.get("attention.head_count_kv")
    if not isinstance(heads, list) or not heads or not all(type(count) is int for count in heads):
        return dict(given)
    return {**given, "attention.head_count_kv": max(heads), "attention.head_count_kv.each": heads}


def lfm2(facts: Facts) -> None:
    """LFM2, with experts or without: layers without heads of keys are convolutions."""
    read, config = facts.read, facts.config
    sparse = config["model_type"] == "lfm2moe"
    config["model_type"] = "lfm2_moe" if sparse else "lfm2"
    config["norm_eps"] = config.pop("rms_norm_eps")
    config["conv_L_cache"] = read.size("shortconv.l_cache", most=64)
    config["conv_bias"] = False
    read.given("attention.head_count_kv.each")
    each = read.config.get("attention.head_count_kv.each", [1] * config["num_hidden_layers"])
    config["layer_types"] = ["full_attention" if heads else "conv" for heads in each]
    if not sparse:
        config["block_auto_adjust_ff_dim"] = False
        return
    facts.experts("num_experts", "moe_intermediate_size")
    config["num_dense_layers"] = read.size("leading_dense_block_count", 0, least=0)
    config["use_expert_bias"] = any(name.endswith("exp_probs_b.bias") for name in facts.tensors)
    if read.size("expert_gating_func", 2) != 2:
        read.refuse("expert_gating_func", "2, a sigmoid")


def gemma4_keys(given: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each list of sizes by layer of a Gemma 4 file by the size of its layers with a window. `gemma4`
    reads the other sizes under their own names.
    """
    out = dict(given)
    for key in ("attention.head_count_kv", "feed_forward_length"):
        if isinstance(out.get(key), list) and out[key]:
            out[f"{key}.each"], out[key] = out[key], out[key][0]
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        if f"{key}_swa" in out:
            out[f"{key}.whole"], out[key] = out.get(key), out.pop(f"{key}_swa")
    return out


def gemma4(facts: Facts) -> None:
    """Gemma 4: layers without a window have other heads, and other rotations."""
    read, config = facts.read, facts.config
    facts.window()
    config["model_type"], config["layer_types"] = "gemma4_text", facts.layer_types(6)
    whole = read.size("attention.key_length.whole", config["head_dim"], *reversed(HEAD_DIMS))
    for key in ("attention.value_length.whole", "rope.dimension_count.whole"):
        if read.size(key, whole, MAX_CONTEXT) != whole:
            read.refuse(key, f"{whole:,}, as attention.key_length is")
    config["global_head_dim"] = whole
    config["final_logit_softcapping"] = (
        read.number("final_logit_softcapping", None, *CAP) if read.given("final_logit_softcapping") else None
    )
    config["num_kv_shared_layers"] = read.size("attention.shared_kv_layers", 0, least=0)
    config["hidden_size_per_layer_input"] = read.size("embedding_length_per_layer_input", 0, least=0)
    config["vocab_size_per_layer_input"] = config["vocab_size"]
    config["enable_moe_block"] = read.size("expert_count", 0, least=0) > 0
    if config["enable_moe_block"]:
        facts.experts("num_experts", "moe_intermediate_size")
        config["top_k_experts"] = config.pop("num_experts_per_tok")
    _gemma4_sizes(facts)
    theta = config.pop("rope_theta")
    factors = facts.factors("rope_freqs.weight") or [1.0] * (whole // 2)
    turning = sum(factor < STILL for factor in factors)
    if factors[:turning] != [1.0] * turning or config.pop("rope_scaling", None) is None:
        raise read.error("tensor 'rope_freqs.weight' is not ones, then pairs that do not rotate")
    config["rope_parameters"] = {
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": read.number("rope.freq_base_swa", 10000.0, *THETA),
        },
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": turning / len(factors),
            "rope_theta": theta,
        },
    }


def _gemma4_sizes(facts: Facts) -> None:
    """The sizes that differ by layer: heads of keys where there is no window, MLPs where keys are shared."""
    read, config, types = facts.read, facts.config, facts.config["layer_types"]
    full = types.index("full_attention") if "full_attention" in types else None
    if read.given("attention.head_count_kv.each"):
        heads = dict(zip(types, read.config["attention.head_count_kv.each"], strict=False))
        config["num_key_value_heads"] = heads.get("sliding_attention", heads.get("full_attention"))
        config["num_global_key_value_heads"] = heads.get("full_attention")
    config["attention_k_eq_v"] = full is not None and not facts.has("attn_v.weight", full)
    if read.given("feed_forward_length.each"):
        inner = read.config["feed_forward_length.each"]
        config["use_double_wide_mlp"] = inner[-1] == 2 * inner[0]


def yarn(facts: Facts, factor: float, original: int) -> dict[str, Any]:
    """The settings of yarn, with those that transformers calls by other names."""
    read = facts.read
    found: dict[str, Any] = {
        "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
    }  # fmt: skip
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if read.given(f"rope.scaling.{key}"):
            found[name] = read.number(f"rope.scaling.{key}", None, *FACTOR)
    if read.given("rope.scaling.yarn_attn_factor"):
        found["attention_factor"] = read.number("rope.scaling.yarn_attn_factor", None, *FACTOR)
    if read.number("rope.scaling.yarn_ext_factor", 1.0, -1.0, 1e3) not in (1.0, -1.0):
        read.refuse("rope.scaling.yarn_ext_factor", "1")
    return found
