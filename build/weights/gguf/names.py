"""Maps GGUF's tensor names to transformers', and describes how the stored values differ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.step.reading import DRAFTS

TOP: Mapping[str, str] = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm", "token_embd_norm": "model.embedding_norm",
}  # fmt: skip
LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
BEFORE = {"ffn_norm": "pre_feedforward_layernorm"}


def _mamba(at: str) -> dict[str, str]:
    """The parts of Mamba-2 in the module `at`."""
    parts = {"in": "in_proj", "conv1d": "conv1d", "dt": "dt_bias", "a": "A_log", "d": "D", "norm": "norm"}
    return {f"ssm_{name}": f"{at}.{ours}" for name, ours in {**parts, "out": "out_proj"}.items()}


QWEN35: Mapping[str, str] = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    **_mamba("linear_attn"),
}
SHARED: Mapping[str, str] = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_shexp": "shared_mlp.gate_proj",
    "ffn_up_shexp": "shared_mlp.up_proj",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
"""The router of a Granite, and the MLP beside its experts."""
LFM2: Mapping[str, str] = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b": "feed_forward.expert_bias",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
NEMOTRON: Mapping[str, str] = {
    **_mamba("mixer"),
    "attn_norm": "norm",
    **{f"attn_{part}": f"mixer.{part}_proj" for part in "qkv"},
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b": "mixer.gate.e_score_correction_bias",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
OWN: Mapping[str, Mapping[str, str]] = {
    "chatglm": {"ffn_up": "mlp.gate_up_proj"},
    "gemma2": BEFORE,
    "gemma3": BEFORE,
    "gemma4": {
        **BEFORE,
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "layer_output_scale": "layer_scalar",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
    },
    "glm4": {
        "ffn_up": "mlp.gate_up_proj",
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    "gpt-oss": {"ffn_gate_inp": "mlp.router", "attn_sinks": "self_attn.sinks"},
    "granitemoe": SHARED,
    "hunyuan-dense": {
        "attn_q_norm": "self_attn.query_layernorm",
        "attn_k_norm": "self_attn.key_layernorm",
    },
    "granitehybrid": {
        **_mamba("mamba"),
        **SHARED,
        "ffn_gate": "shared_mlp.gate_proj",
        "ffn_up": "shared_mlp.up_proj",
        "ffn_down": "shared_mlp.output_linear",
    },
    "nemotron_h": NEMOTRON,
    "nemotron_h_moe": NEMOTRON,
    "falcon-h1": {
        **_mamba("mamba"),
        "ffn_norm": "pre_ff_layernorm",
        **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    },
    "lfm2": LFM2,
    "lfm2moe": LFM2,
    "llama": {"ffn_gate_inp": "block_sparse_moe.gate"},
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "qwen35": QWEN35,
    "qwen35moe": QWEN35,
}
"""Names that differ in an architecture from those of LAYER."""
FREQUENCIES = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that become settings of the config."""
BARE = (
    "layer_scalar", "sinks", "expert_bias", "A_log", "D", "dt_bias", "scale", "per_expert_scale",
    "e_score_correction_bias",
)  # fmt: skip
"""Tensors that transformers names without `.weight`."""
FLAT = (".A_log", ".D", ".conv1d.weight", ".conv.conv.weight", ".mamba.norm.weight", ".mixer.norm.weight")
"""Endings of names of vectors that GGUF stores with two dimensions."""
BACKBONE = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"}
TOPS: Mapping[str, Mapping[str, str]] = {
    "nemotron_h": BACKBONE,
    "nemotron_h_moe": BACKBONE,
    "falcon-h1": {"output_norm": "model.final_layernorm"},
}
"""Names outside of layers that differ in an architecture from those of TOP."""
LAYERS: Mapping[str, str] = dict.fromkeys(("nemotron_h", "nemotron_h_moe"), "backbone.layers")
"""The module of layers, where it is not model.layers."""
PAIRED = ("llama", "granite", "granitehybrid", "granitemoe", "smollm3", "mistral3", "arcee")
"""Architectures that store the rows of q and k with the two values of a rotated pair side by side."""
EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|gate_up|down)_exps\.(weight|bias)")
"""The names of tensors that hold the matrices, or the biases, of all experts of a layer."""
EACH: Mapping[str, Mapping[str, str]] = {
    "llama": {"": "block_sparse_moe.experts", "gate": "w1", "up": "w3", "down": "w2"},
    "gemma4": {"": "experts"},
    "granitehybrid": {"": "block_sparse_moe.experts"},
    "granitemoe": {"": "block_sparse_moe.experts"},
    "lfm2moe": {"": "feed_forward.experts", "gate": "w1", "up": "w3", "down": "w2"},
    "nemotron_h_moe": {"": "mixer.experts"},
}
"""Names of the experts and of their matrices that differ in an architecture from those of a Qwen."""
ONE_MORE = ("gemma", "gemma2", "gemma3", "qwen35", "qwen35moe")
"""Architectures that store the weights of norms as 1 + w, except those in NOT_MORE."""
NOT_MORE = ".linear_attn.norm.weight"


def tensor_name(architecture: str, name: str, layers: int, drafting: int) -> str:
    """Transformers' name of a tensor of a model with `layers` layers; an unknown name is unchanged, and is
    later reported as extra. Tensors of the `drafting` layers behind these have names that begin with DRAFTS.
    """
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?([\w.]+?)(?:\.(weight|bias))?", name)
    if found is None:
        return name
    layer, part, kind = found.group(1), found.group(2), found.group(3) or "weight"
    if layer is not None and int(layer) >= layers:
        return f"{DRAFTS}{name}" if int(layer) < layers + drafting else name
    if layer is None:
        top = {**TOP, **TOPS.get(architecture, {})}.get(part)
        return name if top is None else f"{top}.{kind}"
    found_in = {**LAYER, **OWN.get(architecture, {})}.get(part)
    if found_in is None:
        return name
    at = LAYERS.get(architecture, "model.layers")
    bare = found_in.rpartition(".")[2] in BARE
    return f"{at}.{int(layer)}.{found_in}" + ("" if bare else f".{kind}")


def in_transformers(name: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The values of a tensor of transformers' `name`: GGUF has −exp(A_log)."""
    if not name.endswith(".A_log"):
        return values
    with np.errstate(divide="ignore", invalid="ignore"):  # a value that is not finite is reported later
        return np.asarray(np.log(-values.astype(np.float32)), np.float32)


def expert_names(architecture: str, name: str) -> tuple[str, ...]:
    """Transformers' names of the tensors that a tensor of all experts of a layer holds for each expert, one
    after the other, with {} for the number of the expert; empty for another tensor.
    """
    found = EXPERTS.fullmatch(name)
    if found is None:
        return ()
    layer, part, kind = found.groups()
    own = EACH.get(architecture, {})
    at = f"{LAYERS.get(architecture, 'model.layers')}.{int(layer)}.{own.get('', 'mlp.experts')}"
    names = (own.get(each, f"{each}_proj") for each in part.split("_"))
    return tuple(f"{at}.{{}}.{each}.{kind}" for each in names)


def heads_of(architecture: str, name: str, config: Mapping[str, Any]) -> int | None:
    """The number of heads in a tensor (transformers' `name`) with rows stored by pairs; else None."""
    if architecture not in PAIRED:
        return None
    if ".self_attn.q_proj." in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".self_attn.k_proj." in name else None


def is_one_more(architecture: str, name: str) -> bool:
    """Whether a tensor is a norm that is stored as 1 + w."""
    return architecture in ONE_MORE and name.endswith("norm.weight") and not name.endswith(NOT_MORE)


def pair_rows(start: int, stop: int, head: int) -> npt.NDArray[np.int64]:
    """The rows of the file that hold rows [start, stop) of q or k, where pairs are stored side by side;
    `head`: rows of one head.

    A value of one half of a head is paired with the value head/2 rows away.
    """
    row = np.arange(start, stop)
    inside, half = row % head, head // 2
    return row - inside + inside % half * 2 + inside // half
