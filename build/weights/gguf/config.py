"""Converts a GGUF file's metadata to config.json as transformers has it.

The keys are those of llama.cpp's converter. An unknown key of the architecture may change the computation,
and is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nearfar.build.weights.gguf import families, qwen35, state_spaces
from nearfar.build.weights.gguf.drafts import drafting, without_drafts
from nearfar.build.weights.gguf.facts import WINDOW, Config, Facts
from nearfar.build.weights.gguf.header import GgufTensor, Header
from nearfar.errors import CheckpointError
from nearfar.step.config import EPSILON, MAX_CONTEXT, MAX_LAYERS, ConfigReader
from nearfar.step.kinds import writes_no_text
from nearfar.step.rope import FACTOR, THETA

ROPE_KINDS = ("none", "linear", "yarn", "longrope")
CAP = (1e-3, 1e6)
SCALE = (1e-6, 1e6)


def read_config(header: Header, tensors: Mapping[str, GgufTensor]) -> Config:
    """Convert the metadata of a file whose parts have these tensors. Raises CheckpointError for unsupported
    settings.
    """
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        key = "general.architecture"
        if what := writes_no_text({"model_type": name}, key):
            raise CheckpointError(f"{header.file}: {what}")
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{header.file}: general.architecture is {name!r}; those read are {known}")
    prefix, stored = _own_keys(header)
    held = without_drafts(stored, drafting(stored, str(header.file), prefix))
    given = {key: _plain(value) for key, value in held.items()}
    if name == "gemma4":
        given = families.gemma4_keys(given)
    elif name in HYBRID:
        given = state_spaces.keys(given)
    elif name in ("lfm2", "lfm2moe"):
        given = families.lfm2_keys(given)
    elif name in qwen35.NAMES:
        given = qwen35.keys(given)
    read = ConfigReader(given, str(header.file), prefix)
    facts = Facts(read, tensors, _common(read, name, tensors))
    facts.config.update(_rope(facts))
    ARCHITECTURES[name](facts)
    for key in ("bos", "eos"):
        token = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        facts.config[f"{key}_token_id"] = token
    if unread := read.unread():
        key = next(iter(unread))
        read.refuse(key, "nothing: it is not supported, and may change what the model computes")
    return facts.config


def drafting_layers(header: Header) -> int:
    """The number of layers that draft tokens, behind those of the config."""
    prefix, stored = _own_keys(header)
    return drafting(stored, str(header.file), prefix)


def _own_keys(header: Header) -> tuple[str, dict[str, Any]]:
    """How the architecture's own keys begin in the file, and these keys without that beginning."""
    prefix = f"{header.metadata['general.architecture']}."
    found = {key: value for key, value in header.metadata.items() if key.startswith(prefix)}
    return prefix, {key.removeprefix(prefix): value for key, value in found.items()}


def _plain(value: Any) -> Any:
    """A metadata value as JSON has it; an array with the same value for every layer becomes that value."""
    if not isinstance(value, np.ndarray):
        return value
    items = value.tolist()
    return items[0] if items and all(item == items[0] for item in items) else items


def _common(read: ConfigReader, name: str, tensors: Mapping[str, GgufTensor]) -> Config:
    """Read the keys that every architecture has."""
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise read.error("it has no tensor 'token_embd.weight': it is not a whole language model")
    hidden, heads = read.size("embedding_length"), read.size("attention.head_count")
    head_dim = read.size("attention.key_length", max(1, hidden // heads))
    if read.size("attention.value_length", head_dim) != head_dim:
        read.refuse("attention.value_length", f"{head_dim}, as attention.key_length is")
    read.given("vocab_size")
    return {
        "model_type": name,
        "hidden_size": hidden,
        "intermediate_size": read.size("feed_forward_length"),
        "num_hidden_layers": read.size("block_count", most=MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": read.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": read.size("context_length", most=MAX_CONTEXT),
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon", None, *EPSILON),
        "tie_word_embeddings": "output.weight" not in tensors,
    }


def _rope(facts: Facts) -> Config:
    """Read the settings of the rotation: base, rotated part, scaling of positions."""
    read, head_dim = facts.read, facts.config["head_dim"]
    config: Config = {"rope_theta": read.number("rope.freq_base", 10000.0, *THETA)}
    rotary = read.size("rope.dimension_count", head_dim, most=head_dim)
    if rotary != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    scaling = _scaling(facts)
    return {**config, "rope_scaling": scaling} if scaling else config


def _scaling(facts: Facts) -> Config | None:
    read, context = facts.read, facts.config["max_position_embeddings"]
    kind = read.choice("rope.scaling.type", ROPE_KINDS, "linear")
    read.given("rope.scaling.finetuned")  # this key has no effect on the computation
    factor = read.number("rope.scaling.factor", read.number("rope.scale_linear", 1.0, *FACTOR), *FACTOR)
    original = read.size("rope.scaling.original_context_length", context, MAX_CONTEXT)
    names = ("rope_factors_short.weight", "rope_factors_long.weight")
    short, long = map(facts.factors, names)
    if short and long:
        found: Config = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        if read.given("rope.scaling.attn_factor"):
            found["attention_factor"] = read.number("rope.scaling.attn_factor", None, *FACTOR)
        return {**found, "original_max_position_embeddings": original}
    if kind == "longrope":
        read.refuse("rope.scaling.type", f"another type: there are no tensors {' and '.join(names)}")
    if (factors := facts.factors("rope_freqs.weight")) is not None:
        if kind == "yarn" or (kind == "linear" and factor != 1):
            read.refuse("rope.scaling.type", "none, together with a tensor rope_freqs.weight")
        # Llama 3's frequencies come as divisors, which is longrope without its other settings.
        both = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0, "factor": 1.0}
        return {"rope_type": "longrope", **both, "original_max_position_embeddings": context}
    if read.given("rope.scaling.attn_factor") and read.number("rope.scaling.attn_factor", 1.0, *FACTOR) != 1:
        read.refuse("rope.scaling.attn_factor", "1")
    if kind == "yarn":
        return families.yarn(facts, factor, original)
    return {"rope_type": kind, "factor": factor} if kind == "linear" and factor != 1 else None


def _llama(facts: Facts) -> None:
    """Read Llama's own keys, and those of Mistral, which has the same architecture name and a window, and of
    Mixtral, which has experts.
    """
    facts.config["attention_bias"] = facts.has("attn_q.bias")
    if facts.read.size("expert_count", 0, least=0):
        facts.config["model_type"] = "mixtral"
        facts.experts("num_local_experts")
        if facts.read.given(WINDOW):
            facts.window()
    elif facts.read.given(WINDOW):
        facts.config["model_type"] = "mistral"
        facts.window()
    else:
        facts.config["mlp_bias"] = facts.has("ffn_gate.bias")


def _plainly(facts: Facts) -> None:
    """Read nothing more: the architecture has no keys of its own."""


def _phi3(facts: Facts) -> None:
    if facts.read.given(WINDOW):
        window = facts.read.size(WINDOW, most=MAX_CONTEXT, least=0)
        facts.config["sliding_window"] = window or None


def _granite(facts: Facts) -> None:
    """Read a dense Granite 3 or 4."""
    inner = facts.config["intermediate_size"]
    shared = facts.read.size("expert_shared_feed_forward_length", inner)
    if shared != inner:
        facts.read.refuse("expert_shared_feed_forward_length", f"{inner:,}, as feed_forward_length is")
    _granite_common(facts)


def _granite_common(facts: Facts) -> None:
    """Read Granite's four multipliers. llama.cpp takes `rope.scaling.finetuned` for whether layers rotate."""
    if not facts.read.flag("rope.scaling.finetuned", True):
        facts.read.refuse("rope.scaling.finetuned", "true: a Granite whose layers do not rotate is not read")
    for key in SSM:  # written for all of Granite 4, also where no layer is recurrent
        facts.read.given(f"ssm.{key}")
    _multipliers(facts)
    facts.config["attention_bias"] = facts.has("attn_q.bias")


SSM = ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")


def _multipliers(facts: Facts) -> None:
    scales = {
        "embedding_scale": "embedding_multiplier", "attention.scale": "attention_multiplier",
        "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
    }  # fmt: skip
    for key, name in scales.items():
        facts.config[name] = facts.read.number(key, None, *SCALE)


def _granitemoe(facts: Facts) -> None:
    """Read Granite 3 with experts, or a Granite 4 in which every layer attends, with an MLP beside the
    experts, or without experts in some files.
    """
    read, config = facts.read, facts.config
    if not read.size("expert_count", 0, least=0):
        read.given("expert_used_count")
        config["model_type"] = "granite"
        return _granite(facts)
    facts.experts("num_local_experts")
    if read.given("expert_shared_feed_forward_length"):
        config |= {
            "model_type": "granitemoehybrid",
            "layer_types": ["attention"] * config["num_hidden_layers"],
            "position_embedding_type": "rope",
            "shared_intermediate_size": read.size("expert_shared_feed_forward_length"),
            "shared_mlp_apart": True,
        }
    return _granite_common(facts)


def _granite_hybrid(facts: Facts) -> None:
    state_spaces.granite_hybrid(facts, _multipliers)


def _gemma(facts: Facts, largest: int) -> None:
    """Read windows, softcaps and the scale of queries, which follows from head_dim except in the model with
    most layers.
    """
    config, read = facts.config, facts.read
    facts.window()
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        config[key] = read.number(key, None, *CAP) if read.given(key) else None
    wide = config["num_hidden_layers"] == largest
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"]
    )


def _gemma2(facts: Facts) -> None:
    _gemma(facts, 46)


def _gemma3(facts: Facts) -> None:
    """Read Gemma 3's second rope, for layers with a window, and which layers these are."""
    _gemma(facts, 62)
    read, config = facts.read, facts.config
    config["model_type"] = "gemma3_text"
    read.number("rope.freq_base", None, *THETA)  # no default value would be right
    config["rope_local_base_freq"] = read.number("rope.freq_base_swa", 10000.0, *THETA)
    if read.given("attention.sliding_window_pattern"):
        pattern = "attention.sliding_window_pattern"
        config["sliding_window_pattern"] = read.size(pattern, most=MAX_LAYERS)


HYBRID = ("granitehybrid", "nemotron_h", "nemotron_h_moe", "falcon-h1")
"""Architectures with Mamba-2 layers."""
ARCHITECTURES: Mapping[str, Callable[[Facts], None]] = {
    "llama": _llama,
    "mistral3": families.mistral3,
    "qwen2": _plainly,
    "qwen2moe": families.qwen_moe,
    "qwen2vl": families.seeing,
    "qwen3": _plainly,
    "qwen3moe": families.qwen_moe,
    "qwen3vl": families.seeing,
    "qwen3vlmoe": families.seeing_experts,
    "qwen35": qwen35.qwen35,
    "qwen35moe": qwen35.qwen35,
    "gemma": _plainly,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": families.gemma4,
    "phi3": _phi3,
    "granite": _granite,
    "granitehybrid": _granite_hybrid,
    "nemotron_h": state_spaces.nemotron_h,
    "nemotron_h_moe": state_spaces.nemotron_h,
    "falcon-h1": state_spaces.falcon_h1,
    "granitemoe": _granitemoe,
    "smollm3": _plainly,
    "olmo2": families.olmo2,
    "olmoe": families.olmoe,
    "lfm2": families.lfm2,
    "lfm2moe": families.lfm2,
    "gpt-oss": families.gpt_oss,
    "ernie4_5": _plainly,
    "exaone4": families.exaone4,
    "chatglm": families.glm,
    "glm4": families.glm,
    "hunyuan-dense": families.hunyuan,
    "seed_oss": families.seed_oss,
    "arcee": families.arcee,
}
"""The functions that read an architecture's own keys, by llama.cpp's names."""
