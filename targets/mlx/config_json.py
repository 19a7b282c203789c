"""config.json as mlx-lm and mlx-swift-lm read it, which differs from transformers' version.

Both have other defaults than transformers for absent keys, or require the keys, so all values read from the
checkpoint's config are written out. Most of their classes take rope_theta and rope_scaling from the top
level, where transformers 5 writes rope_parameters; mlx-swift-lm refuses rope_scaling of type "default".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from nearfar.kernels.quantized import Matrix
from nearfar.step.models import ALIASES
from nearfar.step.params import Param
from nearfar.step.reading import Reading

DROPPED = ("quantization", "quantization_config", "transformers_version", "_name_or_path")
DTYPES = ("dtype", "torch_dtype")  # the checkpoint's dtype, to which some models' constants are rounded
WITH_ROPE_PARAMETERS = ("ministral3", "gemma4_text", "cwm")
"""Models whose classes in mlx-lm read rope_parameters as transformers 5 writes it, or that have no class
there and mean something else by a file without rope_parameters.
"""
AS_DEFAULT = ("mrope", "dynamic")
"""Types of rotations that are the default one in texts of at most max_position_embeddings tokens. mlx-lm has
them in few classes. Hunyuan's "dynamic" has an alpha, and is another type.
"""
LLAMAS = ("llama", "mistral", "ministral3", "smollm3")
"""Models that mlx-lm runs with one class: it fails if no layer attends to everything, and treats all layers
as full attention if no types are given.
"""


def module_of(tensor: str) -> str:
    """The path of the module that a tensor belongs to: its name without `.weight`."""
    return tensor.removesuffix(".weight")


def mlx_config(config: Mapping[str, Any], reading: Reading, matrices: Mapping[str, Matrix]) -> dict[str, Any]:
    """The config.json of an artifact; `config` is the checkpoint's, from which `reading` was read."""
    model, text = reading.model, _text_config(reading)
    if reading.config.within:  # the checkpoint is multimodal, and its other parts are not in the files
        around = {
            key: value for key, value in config.items() if not key.endswith("_config") and key not in DROPPED
        }
        out = {**around, "text_config": text, "vocab_size": model.vocab_size}
        out["tie_word_embeddings"] = text["tie_word_embeddings"]
    else:
        out = text
    if settings := quantization(model.step.params, matrices):
        # mlx-lm and mlx-swift-lm read `quantization`, the model hub's pages `quantization_config`
        out["quantization"] = out["quantization_config"] = settings
    return dict(sorted(out.items()))


def _text_config(reading: Reading) -> dict[str, Any]:
    """The text model's config, with the defaults that were taken."""
    read, kind = reading.config, ALIASES.get(reading.model_type, reading.model_type)
    out = {key: value for key, value in read.config.items() if key not in DROPPED}
    out |= {key: value for key, value in read.values().items() if out.get(key) is None and key not in DTYPES}
    out["model_type"] = kind
    out["tie_word_embeddings"] = not any(param.name == "lm_head" for param in reading.model.step.params)
    if kind not in WITH_ROPE_PARAMETERS:
        _spell_rope(kind, out)
    types = out.get("layer_types") or []
    if kind in LLAMAS and types and "full_attention" not in types:
        del out["layer_types"]
    if kind == "internlm3":
        out |= {"qkv_bias": out["attention_bias"], "bias": out["mlp_bias"]}
    if kind == "granitemoehybrid":
        out["layer_types"] = ["attention" if each == "full_attention" else each for each in types]
    if kind in PATTERNS and types:
        out["sliding_window_pattern"] = PATTERNS[kind](types)
    if kind == "qwen3_moe":  # transformers 5 writes another name than mlx-lm and published checkpoints have
        out["num_experts"] = out.pop("num_local_experts", out.get("num_experts"))
    if kind == "gemma4_text" and "per_layer_config" in out:
        # the last layer has no window
        last = out["per_layer_config"].get(str(out["num_hidden_layers"] - 1), {})
        out["global_head_dim"] = last.get("head_dim", out["head_dim"])
        out["num_global_key_value_heads"] = last.get("num_key_value_heads")
    return dict(sorted(out.items()))


def quantization(params: Sequence[Param], matrices: Mapping[str, Matrix]) -> dict[str, Any]:
    """MLX's `quantization`: the most common scheme, then by module the other schemes; false means dense."""
    schemes = Counter((matrix.group, matrix.bits) for matrix in matrices.values() if matrix.quantized)
    if not schemes:
        return {}
    ((group, bits), _), *_ = schemes.most_common(1)
    settings: dict[str, Any] = {"group_size": group, "bits": bits}
    for param in params:
        matrix = matrices.get(param.name)
        if matrix is None or (matrix.group, matrix.bits) == (group, bits):
            continue
        own = {"group_size": matrix.group, "bits": matrix.bits} if matrix.quantized else False
        settings |= {module_of(tensor): own for tensor in param.tensors}
    return settings


def _spell_rope(kind: str, out: dict[str, Any]) -> None:
    """Replace rope_parameters, if present, by rope_theta, rope_scaling and related keys."""
    given = out.pop("rope_parameters", None) or {}
    # the settings have a table for each type of layer, or one for all
    whole = given.get("full_attention", given)
    local = given.get("sliding_attention")
    if kind == "gemma3_text" and isinstance(local, Mapping) and "rope_theta" in local:
        out["rope_local_base_freq"] = local["rope_theta"]
    for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if key in whole:
            out[key] = whole[key]
    scaling = dict(out.get("rope_scaling") or whole)
    named = scaling.get("rope_type") or scaling.get("type") or "default"
    if named in AS_DEFAULT and "alpha" not in scaling:
        named = "default"
    beside = ("rope_theta", "partial_rotary_factor")
    stretched = {
        **{key: value for key, value in scaling.items() if key not in beside},
        "rope_type": named,
        "type": named,
    }
    out["rope_scaling"] = None if named == "default" else stretched


def _interval(types: Sequence[str]) -> int:
    """Gemma 3: the interval at which layers have no window."""
    return (types.index("full_attention") if "full_attention" in types else len(types)) + 1


def _letters(types: Sequence[str]) -> str | None:
    """EXAONE 4: a letter for each layer; None if no layer has a window."""
    sliding = "sliding_attention" in types
    return "".join("L" if kind == "sliding_attention" else "G" for kind in types) if sliding else None


PATTERNS = {"gemma3_text": _interval, "exaone4": _letters}
"""Functions that convert layer_types to the key that mlx-lm's class reads."""
