"""GLM-4 and GLM-Edge (2024): a llama that rotates neighbouring pairs, in half of each head."""

from __future__ import annotations

from nearfar.step.builder import StepBuilder
from nearfar.step.config import ConfigReader
from nearfar.step.decoder import Attention, Mlp, order_of, read_activation, read_decoder
from nearfar.step.model import Model
from nearfar.step.models.glm4 import DEFAULTS
from nearfar.step.models.llama import pre_norm
from nearfar.step.rope import read_rope


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    read = read.filled(DEFAULTS)
    c = read_decoder(read, context)
    rotation = read_rope(read, c.head_dim, c.context, partial=0.5, parts=True)
    order = order_of(rotation, c.head_dim, interleaved=True)
    attend = Attention(c.heads, c.kv_heads, c.head_dim, "rope", order, qkv_bias=read.flag("attention_bias"))
    mlp = Mlp(c.inner, read_activation(read), names=("gate_up_proj",))
    s = StepBuilder()
    s.rope("rope", rotation.rope)
    return pre_norm(s, c, "glm", [attend] * c.layers, mlp)
