"""Makes GGUF files of Hugging Face checkpoints as llama.cpp's converter does, with the `gguf` package. Blocks
of types that the package cannot quantize are random bytes with plausible scales.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

from tests.support import gguf_qwen35

Array = np.ndarray[Any, Any]
KINDS = gguf.GGMLQuantizationType
ARCHITECTURES = {
    "mistral": "llama", "internlm3": "llama", "iquestcoder": "llama", "gemma3_text": "gemma3",
    "gemma4_text": "gemma4", "olmo3": "olmo2", "hunyuan_v1_dense": "hunyuan-dense", "ministral3": "mistral3",
    "glm": "chatglm", "granitemoehybrid": "granite",
    "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss",
    "lfm2_moe": "lfm2moe", "falcon_h1": "falcon-h1", **gguf_qwen35.ARCHITECTURES,
}  # fmt: skip
NORMS = (".mamba.norm.weight", ".mixer.norm.weight")
"""Endings of names of norms in Mamba-2 layers."""
PAIRED = ("llama", "granite", "granitehybrid", "granitemoe", "smollm3", "mistral3", "arcee")
EXPERT = re.compile(
    r"(?:model|backbone)(\.layers\.\d+)\.\w+\.experts\.\d+\.(gate_proj|up_proj|down_proj|w1|w2|w3)(\.weight)"
)
W = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
PATTERNED = ("olmo2", "exaone4", "gemma4")
"""Architectures whose files say for each layer whether it has a window."""
HALVES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,),
    "IQ4_XS": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "MXFP4": (),
    "TQ1_0": (52,), "TQ2_0": (64,), "IQ1_S": (0,), "IQ1_M": (), "IQ2_XXS": (0,), "IQ2_XS": (0,),
    "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
}  # fmt: skip
"""Offsets of the float16 values in a block of each type."""
FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
MIXED = {
    "Q4_K_M": {"v_proj": "Q6_K", "down_proj": "Q6_K", "lm_head": "Q6_K", "": "Q4_K"},
    "Q2_K_S": {"v_proj": "Q4_K", "o_proj": "Q3_K", "embed": "Q6_K", "": "Q2_K"},
    "Q6_K_L": {"v_proj": "Q8_0", "embed": "Q8_0", "": "Q6_K"},
    "Q5_0 and Q8_0": {"v_proj": "Q8_0", "": "Q5_0"},
    "partly floats": {"k_proj": "F16", "": "Q4_K"},
}
"""Types by a part of a tensor's name, of which the first match counts, in the mixtures of llama.cpp and
others.
"""
WIDE: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 261,
    "max_position_embeddings": 160, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "bos_token_id": 256, "eos_token_id": 257,
}  # fmt: skip
"""A config in whose matrices every row consists of whole blocks of every type."""


def random_rows(kind: str, n: int, k: int, seed: int = 0, below: int = 100) -> Array:
    """Rows of random blocks: uint8 [n, bytes], with float16 scales of 0.2 to 1, divided by `below`."""
    rng = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[KINDS[kind]]
    blocks = rng.integers(0, 256, (n * k // block, size), dtype=np.uint8)
    for at in HALVES[kind]:
        values = (rng.uniform(0.2, 1, len(blocks)) * rng.choice([-1, 1], len(blocks)) / below).astype("<f2")
        blocks[:, at : at + 2] = values[:, None].view(np.uint8)
    if kind == "IQ1_M":  # the highest bits of four words are a float16 of about 0.01
        blocks[:, 49:56:2] &= 15
        blocks[:, [53, 55]] |= 2 << 4
    if kind == "MXFP4":
        blocks[:, 0] = 120  # the exponent 120 of a scale is 2^-7
    return blocks.reshape(n, -1)


def type_of(kind: str, name: str) -> str:
    """The type that a tensor has in a file of a kind: a mixture of MIXED, or one type for all."""
    return next((other for part, other in MIXED.get(kind, {}).items() if part in name), kind)


def mixed(folder: Path, kind: str, below: int = 100) -> tuple[Path, dict[str, Array]]:
    """Write a new file of WIDE of a kind, with scales as in random_rows; also gives the values of its
    matrices.
    """
    from tests.support import quantized

    stands_for: dict[str, Array] = {}

    def store(name: str, value: Array) -> tuple[Array, str]:
        here = type_of(kind, name)
        if here in FLOATS:
            stored = np.ascontiguousarray(value.astype(FLOATS[here]))
            stands_for[name] = stored.astype(np.float32)
            return (stored.view(np.uint8) if here == "BF16" else stored), here
        rows = random_rows(here, *value.shape, seed=len(stands_for), below=below)
        stands_for[name] = floats(rows, here)
        return rows, here

    plain = quantized.write(folder / "plain", WIDE, quantized.weights(WIDE))
    return write(plain, folder / "model.gguf", store), stands_for


def floats(rows: Array, kind: str) -> Array:
    """Dequantize rows with the gguf package."""
    return np.asarray(gguf.quants.dequantize(rows, KINDS[kind]), np.float32)


def pair(rows: Array, heads: int) -> Array:
    """Reorder the rows of q and k as the converter does: the two rows of a rotated pair side by side."""
    n = rows.shape[0]
    return rows.reshape(heads, 2, n // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def architecture_of(config: Mapping[str, Any]) -> str:
    """llama.cpp's name of a config's architecture."""
    if config["model_type"] == "granitemoehybrid" and "linear_attention" in config["layer_types"]:
        return "granitehybrid"
    if config["model_type"] == "granitemoehybrid" and config["num_local_experts"]:
        return "granitemoe"
    if "moe" in config.get("layers_block_type", ()):
        return "nemotron_h_moe"
    return ARCHITECTURES.get(config["model_type"], config["model_type"])


def write(
    source: Path,
    file: Path,
    store: Callable[[str, Array], tuple[Array, str]] = lambda name, value: (value, "F32"),
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    tensors: Mapping[str, Array] | None = None,
    vocabulary: Callable[[gguf.GGUFWriter], None] | None = None,
    split: int = 0,
) -> Path:
    """Write a GGUF file of a checkpoint directory. `store`: converts a matrix in transformers' order to its
    bytes and their type. `vocabulary`: adds the tokenizer, by default the byte tokenizer of tiny.py.
    """
    config = json.loads((source / "config.json").read_text())
    architecture = architecture_of(config)
    writer = gguf.GGUFWriter(
        file, architecture, split_max_tensors=split, small_first_shard=False, use_temp_file=False
    )
    layers = len(config.get("layers_block_type") or range(config.get("num_hidden_layers", 0)))
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), layers
    )
    values = load_file(source / "model.safetensors") if tensors is None else tensors
    values, sparse = _with_experts(values), bool(config.get("num_local_experts"))
    _metadata(writer, config, architecture)
    (vocabulary or bytes_vocabulary)(writer)
    change(writer)
    for name, value in values.items():
        if architecture in gguf_qwen35.NAMES:
            name, value = gguf_qwen35.stored(name, value, config)
        elif name.endswith(NORMS):
            value = value.reshape(config.get("n_groups") or config["mamba_n_groups"], -1)
        elif name.endswith((*NORMS, ".A_log", ".D", ".dt_bias", ".conv1d.weight", ".conv1d.bias")):
            _add_vector(writer, names, name, value)
            continue
        value = falcon_scaled(name, value, config) if architecture == "falcon-h1" else value
        stored, kind = store(name, value) if value.ndim > 1 else (value.astype(np.float32), "F32")
        if architecture in PAIRED and ".q_proj." in name:
            stored = pair(stored, config["num_attention_heads"])
        elif architecture in PAIRED and ".k_proj." in name:
            stored = pair(stored, config["num_key_value_heads"])
        if architecture in ("gemma", "gemma2", "gemma3") and name.endswith("norm.weight"):
            stored = stored + np.float32(1)
        for here, rows in _parts(name, stored, architecture.startswith("granite") and sparse):
            new = names.get_name(here, try_suffixes=(".weight", ".bias", ".scale"))
            assert new is not None, here
            if new.endswith("ffn_gate_inp_shexp.weight"):
                rows = rows[0]
            writer.add_tensor(new, np.ascontiguousarray(rows), raw_dtype=KINDS[kind])
    if architecture == "gemma4":
        whole, pairs = config["per_layer_config"], config["rope_parameters"]["full_attention"]
        half = next(iter(whole.values()))["head_dim"] // 2
        turning = int(half * pairs["partial_rotary_factor"])
        factors = np.array([1.0] * turning + [1e30] * (half - turning), np.float32)
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_vector(writer: gguf.GGUFWriter, names: Any, name: str, value: Array) -> None:
    """Add a vector of Mamba-2 in the shape and with the values that the converter gives it."""
    here = name.replace(".dt_bias", ".dt_proj.bias")
    if name.endswith(".A_log"):
        value = -np.exp(value)
    value = value[:, None] if name.endswith((".A_log", ".D")) else value
    value = value[:, 0] if name.endswith(".conv1d.weight") else value
    new = names.get_name(here, try_suffixes=(".weight", ".bias"))
    writer.add_tensor(new, np.ascontiguousarray(value.astype(np.float32)))


def falcon_scaled(name: str, value: Array, config: Mapping[str, Any]) -> Array:
    """Multiply a tensor of Falcon-H1 by its multipliers, as the converter stores it."""
    gate, down = config["mlp_multipliers"]
    attended = config["attention_in_multiplier"]
    factors = {
        "down_proj": down, "gate_proj": gate, "k_proj": config["key_multiplier"] * attended,
        "q_proj": attended, "v_proj": attended, "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"], "in_proj": config["ssm_in_multiplier"],
        "lm_head": config["lm_head_multiplier"], "embed_tokens": config["embedding_multiplier"],
    }  # fmt: skip
    factor = next((factor for part, factor in factors.items() if f"{part}." in name), 1.0)
    if "in_proj.weight" in name:
        inner, of_group = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = (inner, inner, of_group, of_group, config["mamba_n_heads"])
        factor = factor * np.repeat(config["ssm_multipliers"], sizes)[:, None]
    return np.asarray(value * factor, np.float32)


def _with_experts(values: Mapping[str, Array]) -> dict[str, Array]:
    """Join the tensors of a layer's experts, as the converter names them: gate apart from up, and transposed
    from input rows to output rows.
    """
    out: dict[str, Array] = {}
    stacks: dict[str, list[Array]] = {}
    for name in sorted(values, key=lambda name: [int(p) if p.isdigit() else p for p in name.split(".")]):
        value, (layer, _, part) = values[name], name.rpartition(".mlp.experts.")
        if found := EXPERT.fullmatch(name):
            merged = f"model{found[1]}.mlp.experts.{W.get(found[2], found[2])}{found[3]}"
            stacks.setdefault(merged, []).append(value)
        elif "block_sparse_moe.input_linear" in name or "block_sparse_moe.output_linear" in name:
            at = f"{name.partition('.block_sparse_moe')[0]}.mlp.experts"
            if "output" in name:
                out[f"{at}.down_proj.weight"] = value
            else:
                out[f"{at}.gate_proj.weight"], out[f"{at}.up_proj.weight"] = np.split(value, 2, 1)
        elif part.startswith(("gate_up_proj", "down_proj")):  # gpt-oss
            kind = "bias" if part.endswith("_bias") else "weight"
            value = value if kind == "bias" else value.swapaxes(1, 2)
            named = {"gate_proj": value[:, ::2], "up_proj": value[:, 1::2]}
            for one, rows in ({"down_proj": value} if part.startswith("down") else named).items():
                out[f"{layer}.mlp.experts.{one}.{kind}"] = np.ascontiguousarray(rows)
        else:
            value = value[:, 0] if ".conv.conv." in name else value
            name = name.replace("e_score_correction_bias", "e_score_correction")
            ending = ".weight" if name.endswith(".sinks") else ""
            ending = ".bias" if "expert_bias" in name or name.endswith("e_score_correction") else ending
            out[f"{name}{ending}"] = value
    return out | {name: np.stack(each) for name, each in stacks.items()}


def _parts(name: str, rows: Array, beside: bool) -> list[tuple[str, Array]]:
    """A tensor as the converter names it: joined matrices of Granite 4 apart, and with `.weight`; Gemma 4's
    factors. `beside`: whether a Granite's MLP is beside experts.
    """
    mlp = "mlp.shared_expert" if beside else "mlp"
    if "shared_mlp.input_linear" in name:
        at = name.partition(".shared_mlp")[0]
        gate, up = np.split(rows, 2)
        return [(f"{at}.{mlp}.gate_proj.weight", gate), (f"{at}.{mlp}.up_proj.weight", up)]
    name = name.replace("shared_mlp.output_linear", f"{mlp}.down_proj")
    name = name.replace("router.scale", "router.proj.scale")
    name = name.replace("router.per_expert_scale", "experts.down_proj.scale")
    return [
        (
            f"{name}.weight"
            if name.endswith(("layer_scalar", "gate_up_proj", "experts.down_proj"))
            else name,
            rows,
        )
    ]


def _metadata(writer: gguf.GGUFWriter, config: Mapping[str, Any], architecture: str) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    per_type = rope.get("full_attention", rope)
    writer.add_name("test")
    writer.add_license("mit")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    types = config.get("layers_block_type") or config.get("layer_types") or []
    writer.add_block_count(len(types) or config["num_hidden_layers"])
    inner: Any = config.get("intermediate_size")
    if config.get("block_auto_adjust_ff_dim"):
        multiple = config["block_multiple_of"]
        inner = -(-int(config["block_ffn_dim_multiplier"] * int(2 * inner / 3)) // multiple) * multiple
    if architecture.startswith("nemotron_h"):
        inner = config["moe_intermediate_size"] if "moe" in types else inner
        inner = [inner * (kind in ("mlp", "moe")) for kind in types]
    if inner is not None:
        writer.add_feed_forward_length(inner)
    writer.add_head_count(config["num_attention_heads"])
    kv_heads: Any = config["num_key_value_heads"]
    if "conv_L_cache" in config:
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if "conv_L_cache" in config or architecture in ("granitehybrid", "nemotron_h", "nemotron_h_moe"):
        kv_heads = [kv_heads * (kind == "full_attention") for kind in types]
    writer.add_head_count_kv(kv_heads)
    if architecture == "lfm2moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    eps = config.get("norm_eps") or config.get("layer_norm_epsilon") or config["rms_norm_eps"]
    writer.add_layer_norm_rms_eps(eps)
    theta = per_type.get("rope_theta", config.get("rope_theta", 10000.0))
    if per_type.get("alpha"):
        theta *= per_type["alpha"] ** (head_dim / (head_dim - 2))
    writer.add_rope_freq_base(theta)
    writer.add_file_type(0)
    if architecture == "gemma4":
        _gemma4(writer, config)
    else:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(int(head_dim * per_type.get("partial_rotary_factor", 1.0)))
    if per_type.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(per_type["rope_type"]))
        writer.add_rope_scaling_factor(per_type["factor"])
    if per_type.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(per_type["original_max_position_embeddings"])
        if "attention_factor" in per_type:
            writer.add_rope_scaling_yarn_attn_factor(per_type["attention_factor"])
        if "beta_fast" in per_type:
            writer.add_rope_scaling_yarn_beta_fast(per_type["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(per_type["beta_slow"])
    if config.get("sliding_window") and architecture in (
        *PATTERNED, "llama", "gemma2", "gemma3", "phi3", "gpt-oss",
    ):  # fmt: skip
        writer.add_sliding_window(config["sliding_window"])
        if architecture in PATTERNED:
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if architecture == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(per_type["mscale_all_dim"])
        writer.add_attn_temperature_scale(per_type["llama_4_scaling_beta"])
    if experts := config.get("num_experts", config.get("num_local_experts")):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.get("num_experts_per_tok") or config["top_k_experts"])
    if config["model_type"] in ("qwen2_moe", "qwen3_moe"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config["model_type"] == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if architecture in gguf_qwen35.NAMES:
        gguf_qwen35.metadata(writer, config)
    elif "linear_attention" in types or architecture == "falcon-h1":
        _mamba(writer, config)
        if architecture == "nemotron_h_moe":
            _nemotron_experts(writer, config)
        if architecture.startswith("nemotron_h"):
            writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        if architecture != "falcon-h1":
            writer.add_rope_scaling_finetuned(config.get("position_embedding_type") == "rope")
    elif config["model_type"] == "granitemoehybrid":
        writer.add_rope_scaling_finetuned(True)
        writer.add_ssm_conv_kernel(4)
    if config["model_type"] == "granitemoehybrid":
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if architecture in ("granite", "granitehybrid", "granitemoe"):
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])


def _mamba(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """The sizes of Mamba-2 layers."""

    def first(*names: str) -> int:
        return int(next(config[name] for name in names if name in config))

    heads = first("mamba_num_heads", "mamba_n_heads")
    writer.add_ssm_conv_kernel(first("conv_kernel", "mamba_d_conv"))
    writer.add_ssm_state_size(first("ssm_state_size", "mamba_d_state"))
    writer.add_ssm_group_count(first("n_groups", "mamba_n_groups"))
    writer.add_ssm_inner_size(heads * first("mamba_head_dim", "mamba_d_head"))
    writer.add_ssm_time_step_rank(heads)


def _nemotron_experts(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """The keys of a Nemotron's experts."""
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_group_count(config["n_group"])
    if config.get("moe_latent_size") is not None:
        writer.add_moe_latent_size(config["moe_latent_size"])


def _gemma4(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Add the further keys of Gemma 4: sizes of layers with and without a window."""
    types, whole = config["layer_types"], next(iter(config["per_layer_config"].values()))
    shared = config["num_kv_shared_layers"]
    for add, add_swa in (
        (writer.add_key_length, writer.add_key_length_swa),
        (writer.add_value_length, writer.add_value_length_swa),
        (writer.add_rope_dimension_count, writer.add_rope_dimension_count_swa),
    ):
        add(whole["head_dim"])
        add_swa(config["head_dim"])
    if config["enable_moe_block"]:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    if config["use_double_wide_mlp"]:
        inner, own = config["intermediate_size"], len(types) - shared
        writer.add_feed_forward_length([inner * (1 if i < own else 2) for i in range(len(types))])
    if "num_key_value_heads" in whole:
        heads = {"full_attention": whole["num_key_value_heads"]}
        writer.add_head_count_kv([heads.get(kind, config["num_key_value_heads"]) for kind in types])


def bytes_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Write the vocabulary of tiny.py. One byte that no text contains is replaced by a merge, because GGUF
    has no empty lists.
    """
    from tests.support import tiny

    data = json.loads(tiny.tokenizer().to_str())
    data["model"]["vocab"]["zz"] = data["model"]["vocab"].pop("ÿ")
    data["model"]["merges"] = ["z z"]
    byte_level(writer, data, "gpt-2")
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_chat_template(tiny.TEMPLATE)


def byte_level(writer: gguf.GGUFWriter, data: Mapping[str, Any], pre: str) -> None:
    """Write the byte-level BPE of a tokenizer.json."""
    tokens, kinds = _tokens(data)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = data["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])


def sentencepiece(writer: gguf.GGUFWriter, data: Mapping[str, Any], merged: bool = False) -> None:
    """Write a tokenizer.json that was made of SentencePiece's BPE; scores follow from the order of its
    merges. `merged`: also write the merges, as in Gemma 4's files.
    """
    tokens, kinds = _tokens(data)
    special = {entry["content"] for entry in data["added_tokens"]}
    for token, text in enumerate(tokens):
        if text.startswith("<0x") and len(text) == 6:
            kinds[token] = gguf.TokenType.BYTE
    made = {}
    for rank, merge in enumerate(data["model"]["merges"]):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        made.setdefault(left + right, rank)
    scores = [0.0 if text in special else -float(made.get(text, 1e6 + i)) for i, text in enumerate(tokens)]
    writer.add_tokenizer_model("gemma4" if merged else "llama")
    writer.add_tokenizer_pre("default")
    if merged:
        writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]])
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_unk_token_id(tokens.index("<unk>"))


def _tokens(data: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Texts and kinds of all tokens, by id."""
    ids = {index: text for text, index in data["model"]["vocab"].items()}
    kinds = dict.fromkeys(ids, gguf.TokenType.NORMAL)
    for entry in data["added_tokens"]:
        ids[entry["id"]] = entry["content"]
        kinds[entry["id"]] = gguf.TokenType.CONTROL if entry["special"] else gguf.TokenType.USER_DEFINED
        if entry["content"] == "<unk>":
            kinds[entry["id"]] = gguf.TokenType.UNKNOWN
    count = max(ids) + 1
    tokens = [ids.get(index, f"[PAD{index}]") for index in range(count)]
    return tokens, [int(kinds.get(index, gguf.TokenType.UNUSED)) for index in range(count)]
