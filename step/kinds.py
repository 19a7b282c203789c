"""Kinds of models that do not write text token by token, recognized by their config alone.

The module imports nothing heavy: commands use it before they download, load or compile anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nearfar import strict_json
from nearfar.errors import CheckpointError
from nearfar.step.config import show

CONFIG = "config.json"

ENCODERS = frozenset({
    "albert", "bert", "big_bird", "camembert", "canine", "convbert", "data2vec-text", "deberta", "deberta-v2",
    "distilbert", "electra", "ernie", "ernie_m", "esm", "esmc", "eurobert", "flaubert", "fnet", "funnel",
    "gte", "ibert", "jina_bert", "jina_bert_v2", "jina_bert_v3", "jina_embeddings_v3", "layoutlm",
    "longformer", "luke", "megatron-bert", "mobilebert", "modern_bert", "modernbert", "modernvbert", "mpnet",
    "mra", "neo_bert", "neomme", "nezha", "nomic_bert", "nomic_bert_moe", "nystromformer", "perceiver",
    "qdqbert", "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer",
    "splinter", "squeezebert", "t5encoder", "tapas", "ultrabert", "ultravbert", "xlm", "xlm-roberta",
    "xlm-roberta-xl", "xmod", "yoso",
})  # fmt: skip
"""Model types of transformers, and llama.cpp's names that differ, that attend in both directions unless their
config says `is_decoder`, or `causal` (xlm).
"""
ENCODER_DECODERS = frozenset({
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "encoder-decoder", "fsmt", "led", "longt5",
    "m2m_100", "marian", "mbart", "mt5", "mvp", "nllb-moe", "pegasus", "pegasus_x", "plbart", "prophetnet",
    "switch_transformers", "t5", "t5gemma", "t5gemma2", "umt5",
})  # fmt: skip
"""Model types for texts with an encoder for the input and a decoder for the output."""
SCORES = (
    "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering",
    "ForMultipleChoice", "ForRewardModel",
)  # fmt: skip
"""Suffixes of architecture names whose checkpoints have no head for the next token."""

TEXT_ALONE = frozenset({
    "dots3_note", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "git", "got_ocr2", "llama4", "mllama",
    "phi4_multimodal", "qwen3_5", "qwen3_5_moe", "qwen4_exp",
})  # fmt: skip
"""Model types with images that transformers (5.24) can load as a causal language model without their vision
part.
"""
STATES = (
    "mamba_d_state", "ssm_state_size", "state_size", "mamba_d_conv", "conv_L_cache", "linear_conv_kernel_dim",
    "lru_width",
)  # fmt: skip
"""Keys of models with layers that keep a recurrent state instead of attending."""
STATEFUL = ("linear_attention", "conv", "mamba", "mamba2", "recurrent")
"""Values in `layer_types` of layers with a recurrent state. A config that has STATES need not have layers
with one.
"""
DOES = (
    "nearfar runs models that write text token by token, and makes embeddings with models of the same kind, "
    "such as Qwen3-Embedding (nearfar build --embeddings)"
)
VECTORS = (
    f"{DOES}. Run this one with sentence-transformers, or on a server with /v1/embeddings: nearfar serve URL "
    "goes in front of it"
)
MADE_OF_A_DECODER = f"so it is an encoder made of a decoder: {VECTORS}"
OTHERS = f"{DOES}. Run this one with transformers"
WITH_A_DECODER = f"an encoder with a decoder, which reads a text whole before it writes another: {OTHERS}"


def config_in(folder: Path) -> Mapping[str, Any] | None:
    """The config.json of a folder; None if it is missing or unreadable: whoever opens the folder reports
    that.
    """
    try:
        return config_of((folder / CONFIG).read_bytes())
    except OSError:
        return None


def config_of(text: str | bytes) -> Mapping[str, Any] | None:
    """The config in the text of a config.json; None if it is not a JSON object."""
    try:
        read = strict_json.loads(text, infinite=True)
    except ValueError:
        return None
    return read if isinstance(read, dict) else None


def check_writes_text(config: Mapping[str, Any], source: str) -> None:
    """Raise CheckpointError for the config of a model that does not write text: transformers would load it
    with a random head.
    """
    if what := writes_no_text(config):
        raise CheckpointError(f"{source}: {CONFIG}: {what}")


def writes_no_text(config: Mapping[str, Any], key: str = "model_type", within: str = "") -> str | None:
    """What a model that does not write text is, and what can be done with it; None if it writes text, or
    nothing says otherwise.

    `key`: the name of the type's key in messages. `within`: the path before the names of keys.
    """
    kind = config.get("model_type")
    inner = config.get("text_config")
    if isinstance(kind, str) and not (config.get("is_decoder") is True or config.get("causal") is True):
        if _among(kind, ENCODER_DECODERS):
            return f"{within}{key} is {kind!r}, {WITH_A_DECODER}"
        if config.get("is_encoder_decoder") is True:
            return f"{within}is_encoder_decoder is true, so it is {WITH_A_DECODER}"
        if _among(kind, ENCODERS):
            return (
                f"{within}{key} is {kind!r}, an encoder: it reads a text whole and gives vectors or scores. "
                f"{VECTORS}"
            )
    if config.get("use_bidirectional_attention") in (True, "all"):
        given = show(config["use_bidirectional_attention"])
        return f"{within}use_bidirectional_attention is {given}, {MADE_OF_A_DECODER}"
    if config.get("is_causal") is False:
        return f"{within}is_causal is false, {MADE_OF_A_DECODER}"
    classes = config.get("architectures")
    if isinstance(classes, list) and classes and all(str(name).endswith(SCORES) for name in classes):
        return f"{within}architectures is {', '.join(map(str, classes))}: it gives scores. {OTHERS}"
    return writes_no_text(inner, key, "text_config.") if isinstance(inner, Mapping) else None


def torch_refuses(config: Mapping[str, Any]) -> str | None:
    """Why `nearfar serve` cannot run the model of this config.json through PyTorch; None if nothing in it
    rules that out.
    """
    if config.get("vision_config") and config.get("model_type") not in TEXT_ALONE:
        return "transformers has no class for its text alone"
    if config.get("model_type") == "gpt_oss":
        return "it attends with sinks"
    if config.get("attn_logit_softcapping"):
        return f"it attends with attn_logit_softcapping {show(config['attn_logit_softcapping'])}"
    layers = config.get("layer_types")
    if isinstance(layers, list):
        kinds = [kind for kind in layers if kind in STATEFUL]
    else:
        kinds = [key for key in STATES if config.get(key)]
    if kinds:
        return f"it has layers that keep a state ({kinds[0]})"
    inner = config.get("text_config")
    return torch_refuses(inner) if isinstance(inner, Mapping) else None


def _among(kind: str, names: frozenset[str]) -> bool:
    """Whether `kind` is one of `names`, however its words are joined."""
    return _plain(kind) in {_plain(name) for name in names}


def _plain(name: str) -> str:
    return name.replace("-", "").replace("_", "").lower()
