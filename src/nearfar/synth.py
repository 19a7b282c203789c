"""Checkpoints of published shapes with random weights, so that speed can be measured without a download."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nearfar.build.output import output_directory
from nearfar.build.weights.checkpoint import INDEX
from nearfar.errors import BuildError

FILE_BYTES = 1_000_000_000
CHUNK = 1 << 20  # weights drawn at a time; part of what a seed means
BEFORE = 8  # chunks drawn ahead of the writer
MARK = "nearfar_synth"  # key in config.json by which a directory of ours is known

Tensors = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Shape:
    """A published shape: its config.json, and the ids of the special tokens that the chat template uses."""

    config: dict[str, Any]
    turn_start: int
    turn_end: int


_COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}

# As in the config.json of meta-llama/Llama-3.2-1B-Instruct, HuggingFaceTB/SmolLM2-135M-Instruct and Qwen/Qwen3-0.6B.
SHAPES: dict[str, Shape] = {
    "llama-3.2-1b": Shape(
        {
            **_COMMON,
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 8192,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-05,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "initializer_range": 0.02,
            "bos_token_id": 128000,
            "eos_token_id": 128009,
        },
        turn_start=128006,
        turn_end=128009,
    ),
    "smollm2-135m": Shape(
        {
            **_COMMON,
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 576,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "intermediate_size": 1536,
            "vocab_size": 49152,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-05,
            "rope_theta": 100000,
            "rope_scaling": None,
            "initializer_range": 0.041666666666666664,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        turn_start=1,
        turn_end=2,
    ),
    "qwen3-0.6b": Shape(
        {
            **_COMMON,
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "max_window_layers": 28,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000,
            "rope_scaling": None,
            "sliding_window": None,
            "use_sliding_window": False,
            "initializer_range": 0.02,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
        },
        turn_start=151644,
        turn_end=151645,
    ),
}

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|turn|>' + message['role'] + '\\n' + message['content'] + '<|end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"
)


def synth_checkpoint(
    name: str, output: Path, seed: int = 0, progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Write the checkpoint of a shape in SHAPES. `progress` gets (bytes written, bytes in all) of the weights.

    Raises BuildError for an unknown shape, an output that is not ours to replace, or a full disk.
    """
    if name not in SHAPES:
        raise BuildError(f"unknown shape {name!r}: use one of {', '.join(SHAPES)}")
    write_checkpoint(SHAPES[name], output, seed, progress)


def write_checkpoint(
    shape: Shape,
    output: Path,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write config, tokenizer and bfloat16 weights of a shape; memory is that of a few chunks."""
    with output_directory(output, replaceable=_is_ours) as directory:
        _write_json(directory / "config.json", {**shape.config, MARK: {"seed": seed}})
        eos = shape.config["eos_token_id"]
        generation = {"bos_token_id": shape.config["bos_token_id"], "eos_token_id": eos, "do_sample": False}
        _write_json(directory / "generation_config.json", generation)
        _write_tokenizer(directory, shape)
        _write_weights(directory, shape.config, seed, progress, file_bytes)


def tensors(config: dict[str, Any]) -> Tensors:
    """Names and shapes of the weights of a llama or qwen3 config, in the order of the model."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    found: Tensors = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        found[f"{prefix}.input_layernorm.weight"] = (hidden,)
        found[f"{prefix}.self_attn.q_proj.weight"] = (q, hidden)
        found[f"{prefix}.self_attn.k_proj.weight"] = (kv, hidden)
        found[f"{prefix}.self_attn.v_proj.weight"] = (kv, hidden)
        found[f"{prefix}.self_attn.o_proj.weight"] = (hidden, q)
        if config["model_type"] == "qwen3":
            found[f"{prefix}.self_attn.q_norm.weight"] = (head,)
            found[f"{prefix}.self_attn.k_norm.weight"] = (head,)
        found[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        found[f"{prefix}.mlp.gate_proj.weight"] = (inner, hidden)
        found[f"{prefix}.mlp.up_proj.weight"] = (inner, hidden)
        found[f"{prefix}.mlp.down_proj.weight"] = (hidden, inner)
    found["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], hidden)
    return found


def _write_weights(
    directory: Path, config: dict[str, Any], seed: int, progress: Callable[[int, int], None], file_bytes: int
) -> None:
    """Write the safetensors files, and their index where there are several."""
    shapes = tensors(config)
    number = {name: index for index, name in enumerate(shapes)}
    files = _split(shapes, file_bytes)
    total, done = sum(2 * math.prod(shape) for shape in shapes.values()), 0
    weight_map: dict[str, str] = {}
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for index, group in enumerate(files):
            file = f"model-{index + 1:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
            with (directory / file).open("wb") as stream:
                stream.write(_header(group))
                for name, shape in group.items():
                    weight_map[name] = file
                    for chunk in _values(pool, shape, config["initializer_range"], (seed, number[name])):
                        stream.write(chunk.data)
                        done += chunk.nbytes
                        progress(done, total)
    if len(files) > 1:
        _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _split(shapes: Tensors, file_bytes: int) -> list[Tensors]:
    """Divide the tensors into as few files as keep each within file_bytes (a larger tensor has a file of its own)."""
    files: list[Tensors] = [{}]
    filled = 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        if files[-1] and filled + size > file_bytes:
            files.append({})
            filled = 0
        files[-1][name] = shape
        filled += size
    return files


def _header(shapes: Tensors) -> bytes:
    """Make the safetensors header of bfloat16 tensors that lie one after another."""
    records: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * math.prod(shape)
        records[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(records, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _values(
    pool: ThreadPoolExecutor, shape: tuple[int, ...], std: float, key: tuple[int, int]
) -> Iterator[npt.NDArray[np.uint16]]:
    """Draw the tensor's bfloat16 bits in chunks: ones for a norm, else normal(0, std) from key and chunk alone."""
    if len(shape) == 1:
        yield np.ones(shape, ml_dtypes.bfloat16).view(np.uint16)
        return
    size = math.prod(shape)
    chunks = [(key, index, min(CHUNK, size - index * CHUNK), std) for index in range(-(-size // CHUNK))]
    for first in range(0, len(chunks), BEFORE):
        yield from pool.map(_draw, chunks[first : first + BEFORE])


def _draw(job: tuple[tuple[int, int], int, int, float]) -> npt.NDArray[np.uint16]:
    """One chunk of normal(0, std) as bfloat16 bits (the value rounded half up at the 16th bit)."""
    key, index, count, std = job
    random = np.random.Generator(np.random.SFC64(np.random.SeedSequence((*key, index))))
    bits = (random.standard_normal(count, np.float32) * np.float32(std)).view(np.uint32)
    return ((bits + 0x8000) >> 16).astype(np.uint16)


def _write_tokenizer(directory: Path, shape: Shape) -> None:
    """Write a byte-level tokenizer whose every id below vocab_size decodes: special tokens, 256 bytes, filler words."""
    config = shape.config
    special = {config["bos_token_id"]: "<|begin|>", shape.turn_start: "<|turn|>", shape.turn_end: "<|end|>"}
    bos, eos = special[config["bos_token_id"]], special[config["eos_token_id"]]
    plain = iter(_words(sorted(pre_tokenizers.ByteLevel.alphabet())))
    vocab = {special[index] if index in special else next(plain): index for index in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([special[index] for index in sorted(special)])
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), encoding="utf-8")
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": bos,
            "eos_token": eos,
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _words(alphabet: list[str]) -> Iterator[str]:
    """Give the byte characters, then ever new made-up words with a leading space (Ġbababa, Ġbebaba)."""
    yield from alphabet
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    base = len(syllables)
    number = base
    while True:
        word, rest = "", number
        while rest:
            word, rest = syllables[rest % base] + word, rest // base
        yield "\u0120" + word
        number += 1


def _is_ours(path: Path) -> bool:
    """Whether an earlier run wrote this directory."""
    try:
        return MARK in json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def _write_json(path: Path, value: object) -> None:
    """Readable JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
