"""A GGUF file of a checkpoint's shape with random weights, for llama.cpp and what is built on it.

Speed does not depend on the values, so nothing is quantized: blocks are drawn as they lie in the file. With
`q4_0` every matrix is Q4_0, the embeddings too (llama.cpp's own converter gives those more bits, which costs
it speed). With `q4_k_m` matrices get the types that llama.cpp's quantizer gives them under that name
(llama-quant.cpp).
"""

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Kind = gguf.GGMLQuantizationType
MODELS = {
    "llama": "llama",
    "olmoe": "olmoe",
    "lfm2": "lfm2",
    "qwen3_5_text": "qwen35",
    "granitemoehybrid": "granitehybrid",
}
"""The model types that can be written, and llama.cpp's names of their architectures."""
QUANTS = {"q4_0": gguf.LlamaFileType.MOSTLY_Q4_0, "q4_k_m": gguf.LlamaFileType.MOSTLY_Q4_K_M}
SCALES = {
    Kind.Q4_0: (slice(0, 2),),
    Kind.Q5_0: (slice(0, 2),),
    Kind.Q8_0: (slice(0, 2),),
    Kind.Q4_K: (slice(0, 2), slice(2, 4)),
    Kind.Q6_K: (slice(208, 210),),
}
"""Bytes of a block that hold a float16 scale (ggml-common.h); every other byte may have any value."""
MATRICES, EMBEDDINGS = 2**-10, 2**-4
"""Scales. A token's own embedding outweighs what attention adds, so that tokens choose different experts."""
VECTORS = ("ssm_a", "ssm_d", "ssm_norm.weight")
"""Names of vectors that a file has with two dimensions, in layers of Mamba-2."""
UNEVEN = (Kind.Q4_0, Kind.Q5_0)
"""Types whose codes have a mean below 0: half of their scales are negative, as the quantizer's are. Otherwise
all outputs of a matrix have a common part, and all tokens choose the same experts.
"""
FLOATS = ("_inp.", "shortconv.conv", "ssm_conv1d", "ssm_alpha", "ssm_beta")
"""Parts of the names of matrices that stay floats, as the converter leaves them."""
INSTEAD = {Kind.Q4_K: Kind.Q5_0, Kind.Q6_K: Kind.Q8_0}
"""The types that the quantizer uses for rows that are not whole blocks of 256."""


def _head_dim(config: dict[str, Any]) -> int:
    """The head_dim; where config.json omits it, transformers' default."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def write_gguf(checkpoint: Path, output: Path, seed: int = 0, quant: str = "q4_0") -> None:
    """Write `output` with the shape and the tokenizer of a checkpoint of MODELS (byte-level BPE)."""
    config = _settled(json.loads((checkpoint / "config.json").read_text(encoding="utf-8")))
    if config["model_type"] not in MODELS:
        raise ValueError(f"only {', '.join(MODELS)} can be written, not {config['model_type']}")
    writer = gguf.GGUFWriter(output, MODELS[config["model_type"]])
    _add_shape(writer, config)
    writer.add_file_type(QUANTS[quant])
    _add_tokenizer(writer, config, json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8")))
    random = np.random.default_rng(seed)
    for name, shape in _tensors(config).items():
        if len(shape) == 1 or name.endswith(VECTORS):
            sign = -1 if name.endswith("ssm_a") else 1  # the logarithm of a decay
            writer.add_tensor(name, np.full(shape, sign, np.float32))
        else:
            kind = Kind.Q4_0 if quant == "q4_0" else _kind_of_k_m(name, shape, config)
            if any(part in name for part in FLOATS):
                writer.add_tensor(name, random.standard_normal(shape, np.float32) / 64)
                continue
            scale = EMBEDDINGS if name == "token_embd.weight" else MATRICES
            writer.add_tensor(name, _blocks(random, shape, kind, scale), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _settled(config: dict[str, Any]) -> dict[str, Any]:
    """The config with the settings of LFM2, Qwen 3.5 and Granite 4 under the names of others."""
    config.setdefault("bos_token_id", 0)
    if config["model_type"] == "qwen3_5_text":
        return {**config, "rope_theta": config["rope_parameters"]["rope_theta"]}
    if config["model_type"] == "granitemoehybrid":
        return {**config, "num_experts": config["num_local_experts"]}
    if config["model_type"] != "lfm2":
        return config
    multiple = config["block_multiple_of"]
    inner = -(-int(2 * config["block_ff_dim"] / 3) // multiple) * multiple
    return {
        **config,
        "intermediate_size": inner,
        "rms_norm_eps": config["norm_eps"],
        "rope_theta": config["rope_parameters"]["rope_theta"],
    }


def _add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_name("random weights")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    if config["model_type"] == "qwen3_5_text":
        _add_delta(writer, config)
    elif config["model_type"] == "granitemoehybrid":
        _add_granite(writer, config)
    elif "conv" in (types := config.get("layer_types") or ()):
        heads = config["num_key_value_heads"]
        writer.add_head_count_kv([0 if kind == "conv" else heads for kind in types])
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_rope_dimension_count(_head_dim(config))
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])


def _add_delta(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """The sizes of Qwen 3.5's linear attention, and of its partial rotation."""
    heads, rope = config["linear_num_value_heads"], config["rope_parameters"]
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * config["linear_value_head_dim"])
    writer.add_full_attention_interval(config["full_attention_interval"])
    writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    writer.add_rope_dimension_count(int(_head_dim(config) * rope["partial_rotary_factor"]))


def _add_granite(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """The sizes of Granite 4's Mamba-2 layers and of the MLP beside its experts, and its four multipliers.

    A layer without heads of keys has a state. The flag `finetuned` says whether positions are rotated.
    """
    heads, inner = config["num_key_value_heads"], config["mamba_n_heads"] * config["mamba_d_head"]
    writer.add_head_count_kv([heads * (kind == "attention") for kind in config["layer_types"]])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_ssm_inner_size(inner)
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def _mamba_layer(block: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The first block of a layer of Granite 4 with a state."""
    hidden, heads, groups = config["hidden_size"], config["mamba_n_heads"], config["mamba_n_groups"]
    inner = heads * config["mamba_d_head"]
    wide = inner + 2 * groups * config["mamba_d_state"]
    shapes: dict[str, tuple[int, ...]] = {
        "ssm_in.weight": (inner + wide + heads, hidden), "ssm_conv1d.weight": (wide, config["mamba_d_conv"]),
        "ssm_conv1d.bias": (wide,), "ssm_dt.bias": (heads,), "ssm_a": (heads, 1), "ssm_d": (heads, 1),
        "ssm_norm.weight": (groups, inner // groups), "ssm_out.weight": (hidden, inner),
    }  # fmt: skip
    return {f"{block}.{name}": shape for name, shape in shapes.items()}


def _delta_layer(block: str, config: dict[str, Any], hidden: int, q: int) -> dict[str, tuple[int, ...]]:
    """The first block of a layer of Qwen 3.5. `q`: rows of queries, which have gates beside them."""
    heads, value = config["linear_num_value_heads"], config["linear_value_head_dim"]
    wide = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + heads * value
    shapes: dict[str, tuple[int, ...]] = {
        "attn_qkv.weight": (wide, hidden), "attn_gate.weight": (heads * value, hidden),
        "ssm_conv1d.weight": (wide, config["linear_conv_kernel_dim"]), "ssm_dt.bias": (heads,),
        "ssm_a": (heads,), "ssm_beta.weight": (heads, hidden), "ssm_alpha.weight": (heads, hidden),
        "ssm_norm.weight": (value,), "ssm_out.weight": (hidden, heads * value),
    }  # fmt: skip
    if (int(block.split(".")[1]) + 1) % config["full_attention_interval"] == 0:
        kv, head = config["num_key_value_heads"] * _head_dim(config), _head_dim(config)
        shapes = {
            "attn_q.weight": (2 * q, hidden), "attn_k.weight": (kv, hidden), "attn_v.weight": (kv, hidden),
            "attn_output.weight": (hidden, q), "attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,),
        }  # fmt: skip
    return {f"{block}.{name}": shape for name, shape in shapes.items()}


def _add_tokenizer(
    writer: gguf.GGUFWriter, config: dict[str, Any], tokenizer: dict[str, Any], splits: str = "gpt-2"
) -> None:
    """Add the words and merges. `splits`: llama.cpp's name of how the tokenizer splits text into words."""
    special = {token["id"] for token in tokenizer["added_tokens"]}
    words = {index: word for word, index in tokenizer["model"]["vocab"].items()}
    words |= {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    ids = range(config["vocab_size"])
    merges = [" ".join(merge) for merge in tokenizer["model"]["merges"]]
    if not merges:  # llama.cpp wants at least one; this one never happens in the prompts
        merges, words[max(set(ids) - special)] = ["Ń Ń"], "ŃŃ"
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splits)
    writer.add_token_list([words.get(index, f"<unused{index}>") for index in ids])
    kinds = (gguf.TokenType.CONTROL if index in special else gguf.TokenType.NORMAL for index in ids)
    writer.add_token_types(list(kinds))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    ends = config["eos_token_id"]
    writer.add_eos_token_id(ends[0] if isinstance(ends, list) else ends)
    writer.add_add_bos_token(False)


def _tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], _head_dim(config)
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (config["vocab_size"], hidden)}
    short = config["model_type"] == "lfm2"
    for layer in range(config["num_hidden_layers"]):
        block = f"blk.{layer}"
        first = {
            f"{block}.attn_q.weight": (q, hidden),
            f"{block}.attn_k.weight": (kv, hidden),
            f"{block}.attn_v.weight": (kv, hidden),
            f"{block}.attn_output.weight": (hidden, q),
        }
        if short:
            first |= {f"{block}.attn_{part}_norm.weight": (head,) for part in "qk"}
        if short and config["layer_types"][layer] == "conv":
            first = {
                f"{block}.shortconv.conv.weight": (hidden, config["conv_L_cache"]),
                f"{block}.shortconv.in_proj.weight": (3 * hidden, hidden),
                f"{block}.shortconv.out_proj.weight": (hidden, hidden),
            }
        norm = "ffn_norm"
        if config["model_type"] == "qwen3_5_text":
            first, norm = _delta_layer(block, config, hidden, q), "post_attention_norm"
        if config["model_type"] == "granitemoehybrid" and config["layer_types"][layer] == "mamba":
            first = _mamba_layer(block, config)
        tensors |= {
            f"{block}.attn_norm.weight": (hidden,),
            **first,
            f"{block}.{norm}.weight": (hidden,),
            **_second(block, config, hidden, inner),
        }
    tensors["token_embd_norm.weight" if short else "output_norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        tensors["output.weight"] = (config["vocab_size"], hidden)
    return tensors


def _second(block: str, config: dict[str, Any], hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    """The tensors of an MLP, or of experts with their router, and what a model has beside them: the norms of
    q and k of an OLMoE, or the MLP for all tokens of a Granite.
    """
    parts: dict[str, tuple[int, ...]] = {
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    if "num_experts" not in config:
        return {f"{block}.ffn_{part}.weight": shape for part, shape in parts.items()}
    experts, head = config["num_experts"], _head_dim(config)
    if shared := config.get("shared_intermediate_size"):
        every = {"gate": (shared, hidden), "up": (shared, hidden), "down": (hidden, shared)}
        beside: dict[str, tuple[int, ...]] = {f"ffn_{part}_shexp": shape for part, shape in every.items()}
    else:
        beside = {
            "attn_q_norm": (config["num_attention_heads"] * head,),
            "attn_k_norm": (config["num_key_value_heads"] * head,),
        }
    return {
        **{f"{block}.{name}.weight": shape for name, shape in beside.items()},
        f"{block}.ffn_gate_inp.weight": (experts, hidden),
        **{f"{block}.ffn_{part}_exps.weight": (experts, *shape) for part, shape in parts.items()},
    }


def _kind_of_k_m(name: str, shape: tuple[int, ...], config: dict[str, Any]) -> Kind:
    """The type of a matrix in Q4_K_M: six bits for the logits and, in every third layer and in the outermost
    eighths, for attn_v and ffn_down; four and a half bits for the rest.
    """
    layers = config["num_hidden_layers"]
    logits = "token_embd.weight" if config["tie_word_embeddings"] else "output.weight"
    more = name == logits
    if name.endswith(("attn_v.weight", "ffn_down.weight")):
        layer, eighth = int(name.split(".")[1]), layers // 8
        more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    kind = Kind.Q6_K if more else Kind.Q4_K
    return kind if shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 else INSTEAD[kind]


def _blocks(
    random: np.random.Generator, shape: tuple[int, ...], kind: Kind, scale: float
) -> npt.NDArray[np.uint8]:
    """Random rows: any codes, and scales of `scale` or −`scale`."""
    *before, width = shape
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (*before, width // values, size), np.uint8)
    for place in SCALES[kind]:
        blocks[..., place] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    if kind in UNEVEN:
        blocks[..., 1] |= random.integers(0, 2, blocks.shape[:-1], np.uint8) << 7
    return blocks.reshape(*before, -1)


def main() -> None:
    """Write the file from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--quant", choices=QUANTS, default="q4_0")
    arguments = parser.parse_args()
    write_gguf(arguments.checkpoint, arguments.output, quant=arguments.quant)


if __name__ == "__main__":
    main()
