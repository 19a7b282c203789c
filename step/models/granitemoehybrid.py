"""Granite 4 without recurrent layers (350m, 1b, micro): a Granite 3, with experts beside its MLP or not."""

from __future__ import annotations

from dataclasses import replace

from nearfar.step.builder import StepBuilder
from nearfar.step.config import ConfigReader
from nearfar.step.decoder import (
    Attention,
    Mlp,
    attention,
    order_of,
    read_activation,
    read_decoder,
)
from nearfar.step.experts import Block, Shared, block, read_experts
from nearfar.step.model import Model
from nearfar.step.models.granite import MULTIPLIER
from nearfar.step.models.granitemoe import STACKED
from nearfar.step.rope import read_rope

ATTENDING = ("attention", "full_attention")
"""The names of layers that attend, in config.json and in transformers."""
ROUTING = ("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef")
AT = "shared_mlp"
"""The name of the MLP that every token has."""
MAMBA = (
    "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand",
    "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit", "time_step_min",
    "time_step_max", "time_step_floor",
)  # fmt: skip


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json. The stream is divided by the residual multiplier, as in granite.py."""
    c = read_decoder(read, context)
    _refuse(read, c.layers)
    embedding, scale, residual, logits = (
        read.number(key, 1.0, *MULTIPLIER)
        for key in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    )
    s = StepBuilder()
    rope, order = None, None
    if read.choice("position_embedding_type", ("rope", "nope"), "nope") == "rope":
        rotation = read_rope(read, c.head_dim, c.context)
        rope, order = s.rope("rope", rotation.rope), order_of(rotation, c.head_dim)
    else:
        for key in ("rope_theta", "rope_scaling", "rope_parameters"):
            read.given(key)  # no layer rotates
    bias = read.flag("attention_bias")
    attend = Attention(c.heads, c.kv_heads, c.head_dim, rope, order, scale, qkv_bias=bias, o_bias=bias)
    second, eps = _second(read, c.inner), c.eps / residual**2
    x = s.embed("model.embed_tokens.weight", c.vocab, c.hidden, embedding / residual)
    for i in range(c.layers):
        at = f"model.layers.{i}"
        h = s.norm(x, f"{at}.input_layernorm.weight", eps)
        x = s.add(x, attention(s, h, i, attend, c.hidden))
        h = s.norm(x, f"{at}.post_attention_layernorm.weight", eps)
        x = s.add(x, block(s, h, i, second, c.hidden, AT))
    s.logits(s.norm(x, "model.norm.weight", eps, scale=1 / logits), "lm_head.weight", c.vocab, c.tied)
    return c.model("granitemoehybrid", s.finish())


def _second(read: ConfigReader, inner: int) -> Block:
    """The second block of every layer: an MLP, or experts of width `inner` beside it."""
    act = read_activation(read)
    wide = read.size("shared_intermediate_size", 1024)
    mlp = Mlp(wide, act, names=("input_linear",), down="output_linear")
    if not read.size("num_local_experts", 8, least=0):
        for key in ROUTING:
            read.given(key)
        return mlp
    read = read.filled({"num_local_experts": 8, "num_experts_per_tok": 2})
    return replace(
        read_experts(read, inner, "num_local_experts"), activation=act, normalize=0.0, at="block_sparse_moe",
        router="router.layer", stacked=STACKED, apart=False, shared=Shared(mlp, AT),
    )  # fmt: skip


def _refuse(read: ConfigReader, layers: int) -> None:
    """Refuse recurrent layers, and read the keys about them, which nothing uses without them."""
    read.choices("layer_types", ATTENDING, ["mamba"] * layers)
    if not read.given("layer_types"):
        read.refuse("layer_types", "a list of attention layers: recurrent layers are not supported")
    for key in MAMBA:
        read.given(key)
