"""Qwen 1.5 and 2 with experts (1.5-MoE-A2.7B, 2-57B-A14B): beside the chosen experts every token has a shared
one, which a gate weighs.
"""

from __future__ import annotations

from dataclasses import replace

from nearfar.step.builder import StepBuilder
from nearfar.step.config import MAX_LAYERS, ConfigReader
from nearfar.step.decoder import Attention, Mlp, order_of, read_activation, read_decoder, read_windows
from nearfar.step.experts import Shared, read_experts, sparse_layers
from nearfar.step.model import Model
from nearfar.step.models.llama import pre_norm
from nearfar.step.rope import read_rope

FULL = ("full_attention",)


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    c = read_decoder(read, context)
    rotation = read_rope(read, c.head_dim, c.context)
    order = order_of(rotation, c.head_dim)
    attend = Attention(
        c.heads, c.kv_heads, c.head_dim, "rope", order, qkv_bias=read.flag("qkv_bias", True)
    )  # fmt: skip
    act = read_activation(read)
    moe = replace(
        read_experts(read, read.size("moe_intermediate_size", 1408), "num_experts"), activation=act,
        shared=read_shared(read, 5632),
    )  # fmt: skip
    s = StepBuilder()
    s.rope("rope", rotation.rope)
    layers = [replace(attend, window=window) for window in _windows(read, c.layers)]
    return pre_norm(s, c, "qwen2_moe", layers, sparse_layers(read, moe, Mlp(c.inner, act), c.layers))


def read_shared(read: ConfigReader, default: int) -> Shared:
    """The shared expert of Qwen's models; `default`: its width."""
    inner = read.size("shared_expert_intermediate_size", default)
    return Shared(Mlp(inner, read_activation(read)), "mlp.shared_expert", "mlp.shared_expert_gate")


def _windows(read: ConfigReader, layers: int) -> tuple[int | None, ...]:
    """The window of each layer: if windows are on, every other layer before `max_window_layers` has one."""
    read = read.filled({"sliding_window": 4096})
    last = read.size("max_window_layers", 28, most=MAX_LAYERS, least=0)
    given = read.given("sliding_window")  # transformers writes 0 where windows are off
    if not (read.flag("use_sliding_window") and given):
        read.choices("layer_types", FULL, FULL * layers)
        return (None,) * layers
    types = ["sliding_attention" if layer < last and not layer % 2 else FULL[0] for layer in range(layers)]
    return read_windows(read, layers, types)
