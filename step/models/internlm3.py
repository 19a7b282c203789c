"""InternLM3 (2025): a llama whose config.json calls the switches of its biases `qkv_bias` and `bias`."""

from __future__ import annotations

from nearfar.step.config import ConfigReader
from nearfar.step.model import Model
from nearfar.step.models import llama

DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1e-5}


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    attention, rest = read.flag("qkv_bias"), read.flag("bias")
    read = read.filled({**DEFAULTS, "attention_bias": attention, "mlp_bias": rest})
    return llama.plain(read, context, "internlm3")
