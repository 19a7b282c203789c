"""config.json as mlx-lm and mlx-swift-lm read it, which is not quite as transformers writes it.

Both take rope_theta and rope_scaling from the top level, where transformers 5 writes rope_parameters; both take absent keys
for other defaults than transformers (tie_word_embeddings true); mlx-swift-lm refuses rope_scaling of type "default".
So the keys that decide what the model computes are spelled out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nearfar.step.config import ModelConfig

DROPPED = ("quantization", "quantization_config", "rope_parameters", "transformers_version", "_name_or_path")


def mlx_config(
    config: Mapping[str, Any], model: ModelConfig, bits: int, group_size: int, dense: Sequence[str], dtype: str
) -> dict[str, Any]:
    """config.json for the checkpoint's config; `dense` are paths of the layers that stayed dense among quantized ones."""
    out = {key: value for key, value in config.items() if key not in DROPPED}
    out |= {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.context_length,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied,
        "attention_bias": model.attention_bias,
        "mlp_bias": model.mlp_bias,
        "rope_theta": model.rope.theta,
        "rope_scaling": _rope_scaling(model),
        "torch_dtype": dtype,
    }
    out.pop("dtype", None)  # transformers 5's name of torch_dtype, with the checkpoint's value
    if len(set(model.layer_types)) > 1:
        out["layer_types"] = list(model.layer_types)
    else:
        out.pop("layer_types", None)  # mlx-lm fails where no layer is of full attention; without the key it takes all for such
    if bits:
        # the first is read by mlx-lm and mlx-swift-lm, the second by the model hub's pages
        settings = {"group_size": group_size, "bits": bits, **dict.fromkeys(dense, False)}
        out["quantization"] = settings
        out["quantization_config"] = settings
    return dict(sorted(out.items()))


def _rope_scaling(model: ModelConfig) -> dict[str, Any] | None:
    rope = model.rope
    if rope.kind == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.kind, "type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_context,
        }
    return scaling
