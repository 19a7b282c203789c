"""Mixtures of experts (Shazeer et al., "Outrageously Large Neural Networks", 2017): the second block of a
layer, where a router chooses for each token which of many gated MLPs compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nearfar.step import ops
from nearfar.step.builder import StepBuilder, Value
from nearfar.step.config import ConfigReader
from nearfar.step.decoder import Mlp, gated_mlp
from nearfar.step.ops import Activation, Score
from nearfar.step.params import TensorPiece

MAX_EXPERTS = 4096
TRAINING = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
"""Keys about the loss that spreads tokens over experts: they mean nothing outside of training."""


@dataclass(frozen=True)
class Moe:
    """The experts of a layer. `top`: how many a token has; `score`, `normalize`, `scale`: see ops.Route;
    `bias`: the name of the vector that is added for the choice alone.

    `names`: the tensors of gate, up and down in each expert. `at`: the name of the block.
    """

    experts: int
    top: int
    inner: int
    activation: Activation = "silu"
    score: Score = "softmax"
    normalize: float | None = None
    scale: float = 1.0
    bias: str | None = None
    at: str = "mlp"
    router: str = "gate"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stacked: tuple[str, str] | None = None
    """The tensors [experts, 2·inner, hidden] and [experts, hidden, inner] of all experts, if the checkpoint
    stores them in one tensor each, without `names`.
    """


def read_experts(read: ConfigReader, inner: int, *keys: str) -> Moe:
    """Read how many experts there are, under the first of `keys` that is given, and how many a token has.
    `inner`: the width of an expert.
    """
    for key in TRAINING:
        read.given(key)
    key = next((key for key in keys if read.given(key)), keys[0])
    experts = read.size(key, most=MAX_EXPERTS)
    return Moe(experts, read.size("num_experts_per_tok", most=experts), inner)


def experts(s: StepBuilder, x: Value, layer: int, m: Moe, hidden: int) -> Value:
    """The experts of a layer: [M, hidden]."""
    name = f"layers.{layer}"
    route = routed(s, x, layer, m)
    first, last = _pieces(m, f"model.layers.{layer}.{m.at}", hidden)
    return s.append(
        ops.Experts(
            s.fresh("experts"), x.name, route.name,
            s.matrix(f"{name}.experts.gate_up", first, x.width, m.experts),
            s.matrix(f"{name}.experts.down", last, m.inner, m.experts), m.activation,
        )
    )  # fmt: skip


def _pieces(m: Moe, source: str, hidden: int) -> tuple[list[TensorPiece], list[TensorPiece]]:
    """The pieces of all experts' first and second matrices."""
    if m.stacked is not None:
        rows = 2 * m.inner * m.experts, hidden * m.experts
        first, last = (
            TensorPiece(f"{source}.{tensor}.weight", count, stack=m.experts)
            for tensor, count in zip(m.stacked, rows, strict=True)
        )
        return [first], [last]
    gate, up, down = m.names
    each = [f"{source}.experts.{e}" for e in range(m.experts)]
    return (
        [TensorPiece(f"{expert}.{part}.weight", m.inner) for expert in each for part in (gate, up)],
        [TensorPiece(f"{expert}.{down}.weight", hidden) for expert in each],
    )


def routed(s: StepBuilder, x: Value, layer: int, m: Moe, biased: bool = False) -> Value:
    """The choice of experts for each row. `biased`: whether the router has a bias."""
    source, name = f"model.layers.{layer}.{m.at}", f"layers.{layer}"
    extra = None
    if m.bias is not None:
        extra = s.vector(f"{name}.router.{m.bias}", (TensorPiece(f"{source}.{m.bias}", m.experts),))
    return s.route(
        x, f"{name}.router", TensorPiece(f"{source}.{m.router}.weight", m.experts),
        lambda out, logits: ops.Route(out, logits, m.top, m.score, m.normalize, extra, m.scale), biased,
    )  # fmt: skip


Block = Mlp | Moe
"""The second block of a layer: one MLP, or experts."""


def block(s: StepBuilder, x: Value, layer: int, b: Block, hidden: int) -> Value:
    """The second block of a layer: [M, hidden]."""
    return experts(s, x, layer, b, hidden) if isinstance(b, Moe) else gated_mlp(s, x, layer, b, hidden)


def sparse_layers(read: ConfigReader, moe: Moe, mlp: Mlp, layers: int) -> Sequence[Block]:
    """The block of each layer of Qwen's models: every `decoder_sparse_step`-th has experts, unless
    `mlp_only_layers` lists it.
    """
    step = read.size("decoder_sparse_step", 1)
    dense = read.indices("mlp_only_layers", layers)
    moe = replace(moe, normalize=0.0 if read.flag("norm_topk_prob") else None)
    return [mlp if i in dense or (i + 1) % step else moe for i in range(layers)]
