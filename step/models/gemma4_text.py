"""Gemma 4, text (Google, 2026): the dense models E2B, E4B and 31B, and 26B-A4B, which has experts.

Differences from Gemma 3: layers without a window have larger heads, of which a quarter rotates; v is
normalized, and scores are not scaled; the last layers have no keys and values, and read those of the last
earlier layer of their kind; each layer gets an extra embedding of its own; the weights of norms are stored as
they are. In the 31B and 26B-A4B models the keys of layers without a window, before their norm, are also the
values. The experts of 26B-A4B compute beside the MLP; they and their router have norms of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nearfar.step.builder import StepBuilder, Value
from nearfar.step.config import LAYER_TYPES, MAX_CONTEXT, ConfigReader
from nearfar.step.decoder import (
    HEAD_DIMS,
    Attention,
    Decoder,
    Mlp,
    attention,
    gated_mlp,
    order_of,
    read_decoder,
)  # fmt: skip
from nearfar.step.experts import Moe, experts, read_experts
from nearfar.step.model import Model
from nearfar.step.models import gemma2
from nearfar.step.operation import Activation
from nearfar.step.params import TensorPiece
from nearfar.step.rope import read_rope

ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512,
    "max_position_embeddings": 131072, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "sliding_window": 512, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
    "rope_parameters": ROPES, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
"""Defaults for keys that config.json lacks."""
PATTERN = 6  # every sixth layer has no window


@dataclass(frozen=True)
class Layer:
    """The facts that differ by layer. `cache`: the earlier layer's cache that this one reads; None: it has
    its own. `moe`: the experts beside the MLP.
    """

    attention: Attention
    mlp: Mlp
    cache: int | None
    moe: Moe | None


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    read = read.filled(DEFAULTS)
    c = read_decoder(read, context)
    _refuse(read)
    s = StepBuilder()
    mlp = gemma2.read_mlp(read, c.inner)
    layers = _layers(s, read, c, mlp)
    x = s.embed("model.embed_tokens.weight", c.vocab, c.hidden, gemma2.embedding_scale(read, c.hidden))
    extra = _extra_width(read, c)
    extras = _extras(s, read, c, x, extra) if extra else None
    for i, layer in enumerate(layers):
        x = _layer(s, c, x, i, layer)
        if extras is not None:
            x = _add_extra(s, c, x, i, s.columns(extras, i * extra, extra), mlp.activation)
        x = s.scale(x, f"model.layers.{i}.layer_scalar")
    cap = gemma2.read_cap(read, "final_logit_softcapping")
    s.logits(s.norm(x, "model.norm.weight", c.eps), "lm_head.weight", c.vocab, c.tied, softcap=cap)
    return replace(c.model("gemma4_text", s.finish()), unused=_unused(layers))


def _unused(layers: Sequence[Layer]) -> tuple[str, ...]:
    """Names of tensors that nothing reads: published checkpoints have keys and values even for layers that
    read another layer's.
    """
    reading = [i for i, layer in enumerate(layers) if layer.cache is not None]
    return tuple(
        f"model.layers.{i}.self_attn.{name}.weight"
        for i in reading
        for name in ("k_proj", "v_proj", "k_norm")
    )


def _layer(s: StepBuilder, c: Decoder, x: Value, i: int, layer: Layer) -> Value:
    """The attention of a layer, and its MLP with the experts, each with a norm before and after it."""
    at = [f"model.layers.{i}.{name}.weight" for name in (*gemma2.Norms.attention, *gemma2.Norms.mlp)]
    h = attention(s, s.norm(x, at[0], c.eps), i, layer.attention, c.hidden, cache=layer.cache)
    x = s.add(x, s.norm(h, at[1], c.eps))
    h = gated_mlp(s, s.norm(x, at[2], c.eps), i, layer.mlp, c.hidden)
    if layer.moe is not None:
        h = _add_experts(s, c, x, h, i, layer.moe)
    return s.add(x, s.norm(h, at[3], c.eps))


def _add_experts(s: StepBuilder, c: Decoder, x: Value, dense: Value, i: int, moe: Moe) -> Value:
    """The sum of the MLP's result and the experts', each normalized. The experts and their router read x,
    each through a norm of its own.
    """
    at = f"model.layers.{i}"
    h = s.norm(x, f"{at}.pre_feedforward_layernorm_2.weight", c.eps)
    routed_by = s.norm(x, f"{at}.router.scale", c.eps, scale=c.hidden**-0.5)
    h = s.norm(experts(s, h, i, moe, c.hidden, routed_by), f"{at}.post_feedforward_layernorm_2.weight", c.eps)
    return s.add(s.norm(dense, f"{at}.post_feedforward_layernorm_1.weight", c.eps), h)


def _extras(s: StepBuilder, read: ConfigReader, c: Decoder, x: Value, width: int) -> Value:
    """The extra embeddings of all layers, side by side [M, layers·width]: half the token's, half a projection
    of `x`.

    The projection's factor 1/√hidden goes into the epsilon of the norm that follows it.
    """
    wide = c.layers * width
    scale = gemma2.embedding_scale(read, width)
    own = s.embed("model.embed_tokens_per_layer.weight", c.vocab, wide, scale, "embed_per_layer")
    piece = TensorPiece("model.per_layer_model_projection.weight", wide)
    projected = s.linear(x, "per_layer_model_projection", (piece,))
    normed = s.norm(projected, "model.per_layer_projection_norm.weight", c.eps * c.hidden, groups=c.layers)
    return s.add(normed, own, 0.5**0.5)


def _add_extra(s: StepBuilder, c: Decoder, x: Value, i: int, extra: Value, activation: Activation) -> Value:
    """The sum x + norm(projection(activation(gate(x)) · the layer's extra embedding))."""
    at, name = f"model.layers.{i}", f"layers.{i}"
    gate = s.linear(
        x, f"{name}.per_layer_input_gate", (TensorPiece(f"{at}.per_layer_input_gate.weight", extra.width),)
    )
    mixed = s.mul(s.act(gate, activation), extra)
    h = s.linear(
        mixed, f"{name}.per_layer_projection", (TensorPiece(f"{at}.per_layer_projection.weight", c.hidden),)
    )
    return s.add(x, s.norm(h, f"{at}.post_per_layer_input_norm.weight", c.eps))


def _layers(s: StepBuilder, read: ConfigReader, c: Decoder, mlp: Mlp) -> list[Layer]:
    """The facts of each layer. Caches are numbered like the layers that own them."""
    types = _types(read, c.layers)
    read.given("sliding_window")  # read only where a layer has a window
    shared = read.size("num_kv_shared_layers", 0, most=c.layers, least=0)
    own = types[: c.layers - shared]
    if set(own) != set(types):
        read.refuse(
            "num_kv_shared_layers", "so few that each kind of layer has one with keys and values of its own"
        )
    moe = _moe(read, mlp.activation)
    wide = Mlp(mlp.inner * 2, mlp.activation) if read.flag("use_double_wide_mlp") else mlp
    layers = []
    for i, kind in enumerate(types):
        before = None if i < len(own) else len(own) - 1 - own[::-1].index(kind)
        attend = _attention(s, read, c, kind, _sizes(read, c, i, kind))
        layers.append(Layer(attend, mlp if before is None else wide, before, moe))
    return layers


def _moe(read: ConfigReader, activation: Activation) -> Moe | None:
    """The experts of every layer; None: there are none, and no code reads their sizes."""
    if not read.flag("enable_moe_block"):
        for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            read.given(key)
        return None
    inner = read.size("moe_intermediate_size")
    return replace(
        read_experts(read, inner, "num_experts", top="top_k_experts"), activation=activation, normalize=0.0,
        factors="router.per_expert_scale", at="", router="router.proj", apart=False,
    )  # fmt: skip


def _attention(s: StepBuilder, read: ConfigReader, c: Decoder, kind: str, sizes: ConfigReader) -> Attention:
    """The attention of layers of type `kind`. Where keys are also the values, there is no v_proj: the rows of
    k_proj are used twice.
    """
    head_dim = sizes.size("head_dim", c.head_dim, *reversed(HEAD_DIMS))
    rotation = read_rope(read, head_dim, c.context, layer_type=kind)
    local, bias = kind == "sliding_attention", read.flag("attention_bias")
    value = "k_proj" if _twice(read, kind) else "v_proj"
    return Attention(
        c.heads, sizes.size("num_key_value_heads", c.kv_heads), head_dim,
        s.rope("local" if local else "global", rotation.rope), order_of(rotation, head_dim), scale=1.0,
        window=read.size("sliding_window", most=MAX_CONTEXT) if local else None, qkv_bias=bias, o_bias=bias,
        q_norm="q_norm", k_norm="k_norm", norm_eps=c.eps, v_norm=c.eps,
        names=("q_proj", "k_proj", value),
    )  # fmt: skip


def _twice(read: ConfigReader, kind: str) -> bool:
    """Whether the keys of layers of type `kind` are also their values."""
    return read.flag("attention_k_eq_v") and kind == "full_attention"


def _types(read: ConfigReader, layers: int) -> list[str]:
    """The type of each layer; the last one never has a window, whatever config.json says."""
    listed = ["sliding_attention" if (i + 1) % PATTERN else "full_attention" for i in range(layers)]
    return [*read.choices("layer_types", LAYER_TYPES, listed)[:-1], "full_attention"]


def _sizes(read: ConfigReader, c: Decoder, layer: int, kind: str) -> ConfigReader:
    """The sizes of a layer, from `per_layer_config` (transformers) or `global_head_dim` (published files)."""
    if not read.given("per_layer_config"):
        whole = {"head_dim": read.size("global_head_dim", None, *reversed(HEAD_DIMS))}
        if _twice(read, kind):
            whole["num_key_value_heads"] = read.size("num_global_key_value_heads", c.kv_heads)
        return read.empty().filled(whole if kind == "full_attention" else {})
    listed = read.section("per_layer_config")
    if other := set(listed.names()) - {str(i) for i in range(c.layers)}:
        listed.refuse(min(other), f"layers from 0 to {c.layers - 1} only")
    if not listed.given(str(layer)):
        return listed.empty()
    sizes = listed.section(str(layer))
    if unknown := set(sizes.names()) - {"head_dim", "num_key_value_heads"}:
        sizes.refuse(min(unknown), "head_dim and num_key_value_heads only: nothing else can differ by layer")
    return sizes


def _extra_width(read: ConfigReader, c: Decoder) -> int:
    """The width of each layer's extra embedding; 0 if there is none."""
    width, rows = (
        read.size("hidden_size_per_layer_input", 0, least=0),
        read.size("vocab_size_per_layer_input"),
    )
    if width and rows != c.vocab:
        read.refuse("vocab_size_per_layer_input", f"vocab_size, which is {c.vocab:,}")
    return width


def _refuse(read: ConfigReader) -> None:
    """Refuse the features of larger models and encoders of this family."""
    read.given("num_global_key_value_heads")  # read only where keys are values
    read.choice(
        "use_bidirectional_attention", ("vision",), "vision"
    )  # images are not supported, text is causal
