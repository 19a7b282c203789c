"""Gemma ("Gemma: Open Models Based on Gemini Research and Technology", 2024).

Differences from a llama: an embedding times √hidden, GELU, and norms whose weights the checkpoint stores as
w − 1.
"""

from __future__ import annotations

from nearfar.step.builder import StepBuilder
from nearfar.step.config import ConfigReader
from nearfar.step.decoder import Attention, Mlp, order_of, read_activation, read_decoder
from nearfar.step.model import Model
from nearfar.step.models.gemma2 import embedding_scale, refuse_bidirectional
from nearfar.step.models.llama import pre_norm
from nearfar.step.rope import read_rope

DEFAULTS = {
    "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "bos_token_id": 2,
    "eos_token_id": 1,
}  # fmt: skip
"""Defaults for keys that config.json lacks."""


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    read = read.filled(DEFAULTS)
    c = read_decoder(read, context)
    refuse_bidirectional(read)
    activation = read_activation(read)
    rotation = read_rope(read, c.head_dim, c.context)
    bias = read.flag("attention_bias")
    attend = Attention(
        c.heads, c.kv_heads, c.head_dim, "rope", order_of(rotation, c.head_dim), qkv_bias=bias, o_bias=bias
    )
    # Official files say "gelu" and mean its approximation by tanh, which the models were trained with.
    mlp = Mlp(c.inner, "gelu_tanh" if activation == "gelu_erf" else activation)
    s = StepBuilder()
    s.rope("rope", rotation.rope)
    return pre_norm(s, c, "gemma", [attend] * c.layers, mlp, embedding_scale(read, c.hidden), offset=1.0)
