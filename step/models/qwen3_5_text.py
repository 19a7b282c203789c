"""Qwen 3.5, dense (2026): three layers with a gated delta rule to one with gated attention.

Yang et al., "Gated Delta Networks" (2024).
"""

from __future__ import annotations

from dataclasses import dataclass

from nearfar.step import ops
from nearfar.step.builder import StepBuilder, Value
from nearfar.step.config import ConfigReader
from nearfar.step.decoder import Decoder, Mlp, order_of, read_activation, read_decoder
from nearfar.step.experts import Block, block
from nearfar.step.model import Model
from nearfar.step.operation import Activation
from nearfar.step.params import RotaryOrder, TensorPiece
from nearfar.step.rope import read_rope

HEAD_DIM = 256
PARTIAL = 0.25
INTERVAL = 4
TYPES = ("linear_attention", "full_attention")
MROPE = ("mrope_section", "mrope_interleaved")
"""Keys that divide the pairs among three positions of an image; for text the three are one."""


@dataclass(frozen=True)
class DeltaLayer:
    """The sizes of a layer with the delta rule: heads of keys and values, and the convolution before it.
    `tiled`: see ops.Delta.
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    taps: int
    activation: Activation
    tiled: bool


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    c = read_decoder(read, context, head_dim=HEAD_DIM)
    return recurrent(read, c, "qwen3_5_text", Mlp(c.inner, read_activation(read)))


def recurrent(read: ConfigReader, c: Decoder, architecture: str, second: Block) -> Model:
    """A Qwen 3.5 whose layers have `second` for their second block."""
    rotation = read_rope(read, c.head_dim, c.context, partial=PARTIAL, beside=MROPE, parts=True)
    order, bias = order_of(rotation, c.head_dim), read.flag("attention_bias")
    layer = _delta_layer(read)
    s = StepBuilder()
    s.rope("rope", rotation.rope)
    x = s.embed("model.embed_tokens.weight", c.vocab, c.hidden)
    for i, kind in enumerate(_types(read, c.layers)):
        at = f"model.layers.{i}"
        h = s.norm(x, f"{at}.input_layernorm.weight", c.eps, 1.0)
        h = _delta(s, h, i, c, layer) if kind == "linear_attention" else _attention(s, h, i, c, order, bias)
        x = s.add(x, h)
        h = s.norm(x, f"{at}.post_attention_layernorm.weight", c.eps, 1.0)
        x = s.add(x, block(s, h, i, second, c.hidden))
    s.logits(s.norm(x, "model.norm.weight", c.eps, 1.0), "lm_head.weight", c.vocab, c.tied)
    return c.model(architecture, s.finish())


def _types(read: ConfigReader, layers: int) -> tuple[str, ...]:
    """The type of each layer; every fourth attends if the config does not say."""
    every = read.size("full_attention_interval", INTERVAL)
    return read.choices("layer_types", TYPES, [TYPES[(i + 1) % every == 0] for i in range(layers)])


def _delta_layer(read: ConfigReader) -> DeltaLayer:
    sizes = {
        "key_heads": ("num_key_heads", 16), "heads": ("num_value_heads", 32), "taps": ("conv_kernel_dim", 4),
        "key_dim": ("key_head_dim", 128), "value_dim": ("value_head_dim", 128),
    }  # fmt: skip
    found = {name: read.size(f"linear_{key}", default) for name, (key, default) in sizes.items()}
    tiled = read.flag("linear_value_heads_tiled")  # the key of GGUF files, whose heads have another order
    layer = DeltaLayer(**found, activation=read_activation(read), tiled=tiled)
    if layer.heads % layer.key_heads:
        raise read.error(f"{layer.heads} heads of values cannot share {layer.key_heads} heads of keys evenly")
    return layer


def _attention(
    s: StepBuilder, x: Value, layer: int, c: Decoder, order: RotaryOrder | None, bias: bool
) -> Value:
    """Attention times a gate. In the tensor q_proj, heads of queries and of gates alternate."""
    at, name, dim = f"model.layers.{layer}.self_attn", f"layers.{layer}", c.head_dim
    q, gate = (
        [
            TensorPiece(f"{at}.q_proj.weight", dim, (2 * head + half) * dim, None if half else order)
            for head in range(c.heads)
        ]
        for half in (0, 1)
    )
    kv = c.kv_heads * dim
    k, v = TensorPiece(f"{at}.k_proj.weight", kv, 0, order), TensorPiece(f"{at}.v_proj.weight", kv)
    both = s.linear(x, f"{name}.qkv_gate", [*q, k, v, *gate], bias)
    qkv, gates = (
        s.columns(both, 0, c.heads * dim + 2 * kv),
        s.columns(both, c.heads * dim + 2 * kv, c.heads * dim),
    )
    norms = {
        which: s.vector(
            f"{name}.{which}_norm", (TensorPiece(f"{at}.{which}_norm.weight", dim, 0, order),), 1.0
        )
        for which in "qk"
    }
    cache = s.cache(c.kv_heads, dim)
    turned = s.append(
        ops.RopeAppend(s.fresh("q"), qkv.name, cache, c.heads, "rope", norms["q"], norms["k"], c.eps)
    )
    attended = s.append(ops.Attend(s.fresh("attended"), turned.name, cache, c.heads, dim**-0.5))
    gated = s.mul(attended, s.act(gates, "sigmoid"))
    return s.linear(gated, f"{name}.o", (TensorPiece(f"{at}.o_proj.weight", c.hidden),), bias)


def _delta(s: StepBuilder, x: Value, layer: int, c: Decoder, d: DeltaLayer) -> Value:
    """Convolution of [q | k | v], the delta rule, a norm of each head, a gate, output."""
    at, name = f"model.layers.{layer}.linear_attn", f"layers.{layer}"
    wide, values = 2 * d.key_heads * d.key_dim + d.heads * d.value_dim, d.heads * d.value_dim
    qkv = s.linear(x, f"{name}.delta_qkv", (TensorPiece(f"{at}.in_proj_qkv.weight", wide),))
    z = s.linear(x, f"{name}.delta_z", (TensorPiece(f"{at}.in_proj_z.weight", values),))
    pieces = [TensorPiece(f"{at}.in_proj_{part}.weight", d.heads) for part in "ab"]
    gates = s.linear(x, f"{name}.delta_ab", pieces)
    mixed = s.conv(qkv, f"{at}.conv1d", d.taps, d.activation)
    a_log, dt_bias = (
        s.vector(f"{name}.{key}", (TensorPiece(f"{at}.{key}", d.heads),)) for key in ("A_log", "dt_bias")
    )
    state = s.state(d.heads, d.key_dim, d.value_dim)
    out = s.append(
        ops.Delta(
            s.fresh("delta"), mixed.name, gates.name, state, d.key_heads, a_log, dt_bias, tiled=d.tiled
        )
    )  # fmt: skip
    normed = s.norm(out, f"{at}.norm.weight", c.eps, groups=d.heads)
    gated = s.mul(normed, s.act(z, "silu"))
    return s.linear(gated, f"{name}.delta_out", (TensorPiece(f"{at}.out_proj.weight", c.hidden),))
