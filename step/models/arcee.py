"""Arcee AFM (2025): a llama whose MLP has no gate: down(relu(up(x))²)."""

from __future__ import annotations

from nearfar.step.builder import StepBuilder, Value
from nearfar.step.config import ConfigReader
from nearfar.step.decoder import Attention, Mlp, attention, order_of, read_activation, read_decoder
from nearfar.step.model import Model
from nearfar.step.params import TensorPiece
from nearfar.step.rope import read_rope

EPS = 1e-5


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    c = read_decoder(read, context, eps=EPS)
    rotation = read_rope(read, c.head_dim, c.context)
    bias = read.flag("attention_bias")
    attend = Attention(
        c.heads, c.kv_heads, c.head_dim, "rope", order_of(rotation, c.head_dim), qkv_bias=bias, o_bias=bias
    )
    mlp = Mlp(c.inner, read_activation(read, default="relu2"), read.flag("mlp_bias"), names=("up_proj",))
    s = StepBuilder()
    s.rope("rope", rotation.rope)
    x = s.embed("model.embed_tokens.weight", c.vocab, c.hidden)
    for i in range(c.layers):
        at = f"model.layers.{i}"
        h = s.norm(x, f"{at}.input_layernorm.weight", c.eps)
        x = s.add(x, attention(s, h, i, attend, c.hidden))
        h = s.norm(x, f"{at}.post_attention_layernorm.weight", c.eps)
        x = s.add(x, plain_mlp(s, h, i, mlp, c.hidden))
    s.logits(s.norm(x, "model.norm.weight", c.eps), "lm_head.weight", c.vocab, c.tied)
    return c.model("arcee", s.finish())


def plain_mlp(s: StepBuilder, x: Value, layer: int, m: Mlp, hidden: int, at: str = "mlp") -> Value:
    """activation(x·up)·down of a layer, an MLP without a gate: [M, hidden]."""
    source, name = f"model.layers.{layer}.{at}", f"layers.{layer}"
    up = s.linear(x, f"{name}.up", (TensorPiece(f"{source}.{m.names[0]}.weight", m.inner),), m.bias)
    inner = s.act(up, m.activation)
    return s.linear(inner, f"{name}.down", (TensorPiece(f"{source}.{m.down}.weight", hidden),), m.bias)
