"""A GGUF file of a checkpoint's shape with random Q4_0 weights, for llama.cpp and what is built on it.

Speed does not depend on the values, so nothing is quantized: blocks are drawn as they lie in the file. Every
matrix is Q4_0, the embeddings too (llama.cpp's own converter gives those more bits, which costs it speed).
"""

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

BLOCK = 32
BLOCK_BYTES = 2 + BLOCK // 2  # a float16 scale and 32 nibbles


def _head_dim(config: dict[str, Any]) -> int:
    """Where config.json leaves it out, as transformers takes it."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def write_gguf(checkpoint: Path, output: Path, seed: int = 0) -> None:
    """Write `output` with the shape and the tokenizer of a llama checkpoint (byte-level BPE)."""
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama":
        raise ValueError(f"only llama checkpoints can be written, not {config['model_type']}")
    writer = gguf.GGUFWriter(output, "llama")
    _add_shape(writer, config)
    _add_tokenizer(writer, config, json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8")))
    random = np.random.default_rng(seed)
    for name, shape in _tensors(config).items():
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
        else:
            blocks = _q4_0(random, shape, config["initializer_range"])
            writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_name("random weights")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)


def _add_tokenizer(writer: gguf.GGUFWriter, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    special = {token["id"] for token in tokenizer["added_tokens"]}
    words = {index: word for word, index in tokenizer["model"]["vocab"].items()}
    words |= {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    ids = range(config["vocab_size"])
    # llama.cpp wants at least one merge; this one never happens in the prompts.
    merges = [" ".join(merge) for merge in tokenizer["model"]["merges"]] or ["Ń Ń"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([words.get(index, f"<unused{index}>") for index in ids])
    kinds = (gguf.TokenType.CONTROL if index in special else gguf.TokenType.NORMAL for index in ids)
    writer.add_token_types(list(kinds))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def _tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], _head_dim(config)
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        block = f"blk.{layer}"
        tensors |= {
            f"{block}.attn_norm.weight": (hidden,),
            f"{block}.attn_q.weight": (q, hidden),
            f"{block}.attn_k.weight": (kv, hidden),
            f"{block}.attn_v.weight": (kv, hidden),
            f"{block}.attn_output.weight": (hidden, q),
            f"{block}.ffn_norm.weight": (hidden,),
            f"{block}.ffn_gate.weight": (inner, hidden),
            f"{block}.ffn_up.weight": (inner, hidden),
            f"{block}.ffn_down.weight": (hidden, inner),
        }
    tensors["output_norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        tensors["output.weight"] = (config["vocab_size"], hidden)
    return tensors


def _q4_0(random: np.random.Generator, shape: tuple[int, ...], std: float) -> npt.NDArray[np.uint8]:
    """Random Q4_0 rows whose weights have about that standard deviation."""
    rows, width = shape
    blocks = np.empty((rows, width // BLOCK, BLOCK_BYTES), np.uint8)
    # A nibble minus 8 is uniform on -8…7, whose standard deviation is 4.6.
    scale = np.float16(std / 4.6)
    blocks[..., :2] = np.frombuffer(scale.tobytes(), np.uint8)
    blocks[..., 2:] = random.integers(0, 256, (*blocks.shape[:2], BLOCK // 2), np.uint8)
    return blocks.reshape(rows, -1)


def main() -> None:
    """Write the file from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    write_gguf(arguments.checkpoint, arguments.output)


if __name__ == "__main__":
    main()
