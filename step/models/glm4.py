"""GLM-4-0414 (2025): norms around each block as in Gemma 2; neighbouring pairs rotate, in half of each
head.
"""

from __future__ import annotations

from nearfar.step.builder import StepBuilder
from nearfar.step.config import ConfigReader
from nearfar.step.decoder import Attention, Decoder, Mlp, order_of, read_activation, read_decoder
from nearfar.step.model import Model
from nearfar.step.models.gemma2 import Norms, sandwich
from nearfar.step.rope import Rope, read_rope

NORMS = Norms(
    ("input_layernorm", "post_self_attn_layernorm"), ("post_attention_layernorm", "post_mlp_layernorm")
)
DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1.5625e-07, "attention_bias": True}


def read_blocks(read: ConfigReader, context: int | None) -> tuple[Decoder, Rope, Attention, Mlp]:
    """The sizes, the rotation, the attention and the MLP of a GLM-4 of 2024 or 2025."""
    read = read.filled(DEFAULTS)
    c = read_decoder(read, context)
    rotation = read_rope(read, c.head_dim, c.context, partial=0.5, parts=True)
    order = order_of(rotation, c.head_dim, interleaved=True)
    attend = Attention(c.heads, c.kv_heads, c.head_dim, "rope", order, qkv_bias=read.flag("attention_bias"))
    mlp = Mlp(c.inner, read_activation(read), names=("gate_up_proj",))
    return c, rotation.rope, attend, mlp


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    c, rope, attend, mlp = read_blocks(read, context)
    s = StepBuilder()
    s.rope("rope", rope)
    return sandwich(s, c, "glm4", [attend] * c.layers, mlp, NORMS)
