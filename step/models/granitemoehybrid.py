"""Granite 4: a Granite 3 in which most layers may be Mamba-2 instead of attention, and in which a shared MLP
stands beside the experts, if there are any.
"""

from __future__ import annotations

from dataclasses import replace

from nearfar.step.builder import StepBuilder
from nearfar.step.config import ConfigReader
from nearfar.step.decoder import (
    Attention,
    attention,
    order_of,
    read_activation,
    read_decoder,
)
from nearfar.step.experts import TRAINING, Block, Shared, block
from nearfar.step.mamba import mamba, read_mamba
from nearfar.step.model import Model
from nearfar.step.models.granite import MULTIPLIER
from nearfar.step.models.granitemoe import SHARED, granite_experts, shared_mlp
from nearfar.step.operation import Activation
from nearfar.step.rope import read_rope

RECURRENT = ("mamba", "linear_attention")
"""The names of Mamba's layers, in config.json and in transformers."""
TYPES = ("attention", "full_attention", *RECURRENT)
IDLE = (
    "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand",
    "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit",
)  # fmt: skip
"""Keys that mean nothing where no layer is recurrent."""
START = ("time_step_min", "time_step_max", "time_step_floor")
"""Keys about the first values of weights, before training."""


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json. The stream is divided by the residual multiplier, as in granite.py."""
    c = read_decoder(read, context)
    for key in START:
        read.given(key)
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
    activation = read_activation(read)
    types = read.choices("layer_types", TYPES, [RECURRENT[0]] * c.layers)
    mixer = None
    if set(types) & set(RECURRENT):
        mixer = read_mamba(read, read.size("mamba_expand", 2) * c.hidden, activation, c.eps)
    else:
        for key in IDLE:
            read.given(key)
    second, eps = _second(read, c.inner, activation), c.eps / residual**2
    x = s.embed("model.embed_tokens.weight", c.vocab, c.hidden, embedding / residual)
    for i, kind in enumerate(types):
        at = f"model.layers.{i}"
        h = s.norm(x, f"{at}.input_layernorm.weight", eps)
        if mixer is not None and kind in RECURRENT:
            x = s.add(x, mamba(s, h, i, mixer, c.hidden))
        else:
            x = s.add(x, attention(s, h, i, attend, c.hidden))
        h = s.norm(x, f"{at}.post_attention_layernorm.weight", eps)
        x = s.add(x, block(s, h, i, second, c.hidden, SHARED))
    s.logits(s.norm(x, "model.norm.weight", eps, scale=1 / logits), "lm_head.weight", c.vocab, c.tied)
    return c.model("granitemoehybrid", s.finish())


def _second(read: ConfigReader, inner: int, activation: Activation) -> Block:
    """The second block of every layer: an MLP, or experts of width `inner` beside it."""
    wide = read.size("shared_intermediate_size", 1024)
    apart = read.flag("shared_mlp_apart")  # the key of GGUF files, which have gate and up by themselves
    mlp = shared_mlp(wide, activation, ("gate_proj", "up_proj") if apart else ("input_linear",))
    if not read.size("num_local_experts", 8, least=0):
        for key in ("num_experts_per_tok", *TRAINING):
            read.given(key)
        return mlp
    filled = read.filled({"num_local_experts": 8, "num_experts_per_tok": 2})
    return replace(granite_experts(filled, inner, activation), shared=Shared(mlp, SHARED))
