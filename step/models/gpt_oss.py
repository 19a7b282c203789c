"""gpt-oss (OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025): experts with biases and a clamped gate,
heads with sinks, windows in every other layer.

Published checkpoints store the experts' matrices as four-bit floats (build/weights/quantized/mxfp4.py),
others as floats, input by input. The rows of gate and up alternate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nearfar.step import ops
from nearfar.step.builder import StepBuilder, Value
from nearfar.step.config import ConfigReader
from nearfar.step.decoder import Attention, Decoder, attention, order_of, read_decoder, read_windows
from nearfar.step.experts import NAMES, Moe, each_expert, read_experts, routed
from nearfar.step.model import Model
from nearfar.step.params import RotaryOrder, TensorPiece
from nearfar.step.rope import read_rope

DEFAULTS: Mapping[str, Any] = {
    "head_dim": 64, "sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4,
}  # fmt: skip
EPS, THETA = 1e-5, 150000.0
YARN: Mapping[str, Any] = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
"""Parameters of the rotation if config.json has none."""
GATE = (1e-3, 1e3)


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    read = read.filled(DEFAULTS)
    c = read_decoder(read, context, eps=EPS)
    if not read.given("rope_parameters") and not read.given("rope_scaling"):
        read = read.filled({"rope_scaling": YARN})
    rotation = read_rope(read, c.head_dim, c.context, theta=THETA)
    read.choice("hidden_act", ("silu",), "silu")  # the gate below has no other
    bias = read.flag("attention_bias", True)
    moe = read_experts(read, c.inner, "num_local_experts")
    clamp = read.number("swiglu_alpha", 1.702, *GATE), read.number("swiglu_limit", 7.0, *GATE)
    types = ["full_attention" if i % 2 else "sliding_attention" for i in range(c.layers)]
    s = StepBuilder()
    s.rope("rope", rotation.rope)
    x = s.embed("model.embed_tokens.weight", c.vocab, c.hidden)
    for i, window in enumerate(read_windows(read, c.layers, types)):
        attend = Attention(
            c.heads, c.kv_heads, c.head_dim, "rope", order_of(rotation, c.head_dim), window=window,
            qkv_bias=bias, o_bias=bias, sinks="sinks",
        )  # fmt: skip
        at = f"model.layers.{i}"
        x = s.add(x, attention(s, s.norm(x, f"{at}.input_layernorm.weight", c.eps), i, attend, c.hidden))
        x = s.add(x, _experts(s, s.norm(x, f"{at}.post_attention_layernorm.weight", c.eps), i, moe, c, clamp))
    s.logits(s.norm(x, "model.norm.weight", c.eps), "lm_head.weight", c.vocab, c.tied)
    return c.model("gpt_oss", s.finish())


def _experts(s: StepBuilder, x: Value, i: int, m: Moe, c: Decoder, clamp: tuple[float, float]) -> Value:
    """The experts of a layer, whose weights are a softmax over the chosen logits alone: [M, hidden]."""
    route = routed(s, x, i, Moe(m.experts, m.top, m.inner, normalize=0.0, router="router"), biased=True)
    source, name, wide = f"model.layers.{i}.mlp.experts", f"layers.{i}.experts", 2 * m.inner
    apart = RotaryOrder(wide, wide, interleaved=True)  # gates before ups

    def pieces(part: str, rows: int, order: RotaryOrder | None, transposed: bool) -> list[TensorPiece]:
        return [TensorPiece(f"{source}.{part}", rows * m.experts, 0, order, m.experts, transposed)]

    def each(kind: str) -> tuple[list[TensorPiece], list[TensorPiece]]:
        """The pieces of a GGUF file."""
        first, last = (m.inner, NAMES[:2]), (c.hidden, NAMES[2:])
        return each_expert(source, m.experts, *first, kind), each_expert(source, m.experts, *last, kind)

    weights, biases = each("weight"), each("bias")
    return s.append(
        ops.Experts(
            s.fresh("experts"), x.name, route.name,
            s.matrix(f"{name}.gate_up", pieces("gate_up_proj", wide, apart, True), c.hidden, m.experts,
                     otherwise=weights[0]),
            s.matrix(f"{name}.down", pieces("down_proj", c.hidden, None, True), m.inner, m.experts,
                     otherwise=weights[1]),
            "silu",
            s.vector(f"{name}.gate_up_bias", pieces("gate_up_proj_bias", wide, apart, False),
                     otherwise=biases[0]),
            s.vector(f"{name}.down_bias", pieces("down_proj_bias", c.hidden, None, False),
                     otherwise=biases[1]),
            clamp,
        )
    )  # fmt: skip
