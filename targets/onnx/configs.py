"""The config files beside the graph, which Transformers.js and onnxruntime-genai read before they load it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nearfar.kernels.quantized import Matrix
from nearfar.step.model import Model
from nearfar.step.models import ALIASES
from nearfar.step.ops import Attend
from nearfar.step.reading import Reading

FOLDER = "onnx"
"""The folder in which Transformers.js looks for graphs."""
DROPPED = (
    "quantization",
    "quantization_config",
    "transformers_version",
    "_name_or_path",
    "dtype",
    "torch_dtype",
)
STORED = {2: ("q2", "_q2"), 4: ("q4", "_q4"), 8: ("q8", "_quantized")}
"""By the bits of codes, Transformers.js's name for the model, and the ending of the graph's name."""
DENSE = ("fp32", "")
GENERIC = "decoder"
"""onnxruntime-genai's name for any model of tokens, mask, past and present."""


def stored_as(bits: int) -> tuple[str, str]:
    """Name and ending for a model whose widest codes have `bits` bits; 0: the model has no codes."""
    return STORED[bits] if bits else DENSE


def graph_file(bits: int) -> str:
    """The path of the graph in the artifact."""
    return f"{FOLDER}/model{stored_as(bits)[1]}.onnx"


def transformers_config(reading: Reading, model: Model, bits: int, parts: int) -> dict[str, Any]:
    """The config.json: the text model's, with the sizes of its cache written out, and the graph to load.

    Transformers.js makes the first past from num_hidden_layers, num_key_value_heads and head_dim, by names
    that depend on model_type; `dtype` selects the graph, whose data is in `parts` files.
    """
    kept = {key: value for key, value in reading.config.config.items() if key not in DROPPED}
    read = {key: value for key, value in reading.config.values().items() if key not in DROPPED}
    first, name = model.step.caches[0], f"model{stored_as(bits)[1]}.onnx"
    sizes = {
        "model_type": ALIASES.get(reading.model_type, reading.model_type),
        "num_key_value_heads": first.kv_heads,
        "head_dim": first.head_dim,
        "vocab_size": model.vocab_size,
        "eos_token_id": list(model.eos_token_ids) or None,
        "bos_token_id": model.bos_token_id,
    }
    loaded = {"dtype": stored_as(bits)[0], "use_external_data_format": {name: parts}}
    merged = {**read, **{key: value for key, value in kept.items() if value is not None}, **sizes}
    return dict(sorted({**merged, "transformers.js_config": loaded}.items()))


def generation_config(given: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """The generation_config.json: the checkpoint's, with the tokens that begin and end a text."""
    tokens = {"bos_token_id": model.bos_token_id, "eos_token_id": list(model.eos_token_ids) or None}
    return {**given, **{key: value for key, value in tokens.items() if value is not None}}


def genai_config(model: Model, hidden: int, bits: int) -> dict[str, Any]:
    """The genai_config.json for onnxruntime-genai, which takes one size for all caches: the first cache's."""
    cache = model.step.caches[0]
    heads = next(op.heads for op in model.step.ops if isinstance(op, Attend))
    ends = list(model.eos_token_ids)
    decoder = {
        "session_options": {"provider_options": []},
        "filename": graph_file(bits),
        "head_size": cache.head_dim,
        "hidden_size": hidden,
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
        "num_attention_heads": heads,
        "num_hidden_layers": len(model.step.caches),
        "num_key_value_heads": cache.kv_heads,
    }
    return {
        "model": {
            "type": GENERIC,
            "context_length": model.context_length,
            "vocab_size": model.vocab_size,
            "bos_token_id": model.bos_token_id or 0,
            "eos_token_id": ends or [model.vocab_size - 1],
            "pad_token_id": ends[0] if ends else 0,
            "decoder": decoder,
        },
        "search": {
            "do_sample": False,
            "max_length": model.context_length,
            "num_beams": 1,
            "past_present_share_buffer": False,
        },
    }


def stored_bits(bits: int) -> int:
    """The bits in which codes of `bits` bits are stored: the next width that ONNX Runtime's
    operators take.
    """
    return next(width for width in STORED if width >= bits)


def widest(matrices: Mapping[str, Matrix]) -> int:
    """The bits of the widest stored codes; 0 if no matrix is quantized."""
    return max((stored_bits(matrix.bits) for matrix in matrices.values() if matrix.quantized), default=0)
