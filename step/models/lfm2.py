"""LFM2 (Liquid AI, 2025): gated short convolutions, and attention in some layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nearfar.step.builder import StepBuilder, Value
from nearfar.step.config import EPSILON, ConfigReader
from nearfar.step.decoder import Attention, Decoder, Mlp, attention, order_of, read_decoder
from nearfar.step.experts import Block, block
from nearfar.step.model import Model
from nearfar.step.params import TensorPiece
from nearfar.step.rope import read_rope

DEFAULTS = {"intermediate_size": 12288}
THETA = 1e6
TYPES = ("conv", "full_attention")
TAPS = 64
"""The most taps of a convolution."""
NAMES = ("w1", "w3", "w2")
"""The tensors of gate, up and down of an MLP."""
AT = "feed_forward"


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    read = read.filled(DEFAULTS)
    c = read_sizes(read, context)
    mlp = Mlp(_inner(read, c.inner), names=NAMES[:2], down=NAMES[2])
    return convolving(read, c, "lfm2", [mlp] * c.layers)


def read_sizes(read: ConfigReader, context: int | None) -> Decoder:
    """The facts that all decoders share, under LFM2's names."""
    c = read_decoder(read, context, tied=True)
    return replace(c, eps=read.number("norm_eps", 1e-5, *EPSILON), tied=read.flag("tie_embedding", c.tied))


def convolving(read: ConfigReader, c: Decoder, architecture: str, blocks: Sequence[Block]) -> Model:
    """An LFM2 whose layers have `blocks` for their second ones."""
    rotation = read_rope(read, c.head_dim, c.context, theta=THETA)
    attend = Attention(
        c.heads, c.kv_heads, c.head_dim, "rope", order_of(rotation, c.head_dim),
        q_norm="q_layernorm", k_norm="k_layernorm", norm_eps=c.eps, o_name="out_proj",
    )  # fmt: skip
    taps, bias = read.size("conv_L_cache", 3, TAPS), read.flag("conv_bias")
    s = StepBuilder()
    s.rope("rope", rotation.rope)
    x = s.embed("model.embed_tokens.weight", c.vocab, c.hidden)
    for i, kind in enumerate(_types(read, c.layers)):
        at = f"model.layers.{i}"
        h = s.norm(x, f"{at}.operator_norm.weight", c.eps)
        h = _convolution(s, h, i, taps, bias) if kind == "conv" else attention(s, h, i, attend, c.hidden)
        x = s.add(x, h)
        h = s.norm(x, f"{at}.ffn_norm.weight", c.eps)
        x = s.add(x, block(s, h, i, blocks[i], c.hidden, AT))
    s.logits(s.norm(x, "model.embedding_norm.weight", c.eps), "lm_head.weight", c.vocab, c.tied)
    return c.model(architecture, s.finish())


def _types(read: ConfigReader, layers: int) -> tuple[str, ...]:
    """The type of each layer. Older configs list the numbers of the layers that attend."""
    attending = tuple(range(layers))
    if read.given("full_attn_idxs") and not read.given("layer_types"):
        attending = read.indices("full_attn_idxs", layers)
    return read.choices("layer_types", TYPES, [TYPES[i in attending] for i in range(layers)])


def _inner(read: ConfigReader, inner: int) -> int:
    """The width of the MLP: two thirds of the config's number, times a factor, rounded up."""
    inner = read.size("block_ff_dim", inner)
    multiple = read.size("block_multiple_of", 256)
    factor = read.number("block_ffn_dim_multiplier", 1.0, 1e-3, 100.0)
    if not read.flag("block_auto_adjust_ff_dim", True):
        return inner
    return -(-int(factor * int(2 * inner / 3)) // multiple) * multiple


def _convolution(s: StepBuilder, x: Value, layer: int, taps: int, bias: bool) -> Value:
    """Projection to [b | c | x], convolution of b·x, product with c, output."""
    at, name = f"model.layers.{layer}.conv", f"layers.{layer}.conv"
    projected = s.linear(x, f"{name}.in_proj", (TensorPiece(f"{at}.in_proj.weight", 3 * x.width),), bias)
    b, c, value = (s.columns(projected, part * x.width, x.width) for part in range(3))
    mixed = s.mul(c, s.conv(s.mul(b, value), f"{at}.conv", taps, biased=bias))
    return s.linear(mixed, f"{name}.out_proj", (TensorPiece(f"{at}.out_proj.weight", x.width),), bias)
