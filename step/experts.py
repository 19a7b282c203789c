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
from nearfar.step.operation import Activation, Score
from nearfar.step.params import TensorPiece

MAX_EXPERTS = 4096
TRAINING = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
"""Keys about the loss that spreads tokens over experts: they mean nothing outside of training."""


NAMES = ("gate_proj", "up_proj", "down_proj")
"""The names of gate, up and down in most models."""


@dataclass(frozen=True)
class Shared:
    """An MLP that every token has beside its experts. `at`: its name. `gate`: the name of the matrix [1,
    hidden] by which a row's logit of the MLP's weight is computed; None: the weight is 1.
    """

    mlp: Mlp
    at: str
    gate: str | None = None


@dataclass(frozen=True)
class Moe:
    """The experts of a layer. `top`: how many a token has; `score`, `normalize`, `scale`: see ops.Route;
    `bias`: the name of the vector that is added for the choice alone; `factors`: that of the experts' own
    factors.

    `at`: the name of the block, empty if its parts are named as parts of the layer.
    """

    experts: int
    top: int
    inner: int
    activation: Activation = "silu"
    score: Score = "softmax"
    normalize: float | None = None
    scale: float = 1.0
    bias: str | None = None
    factors: str | None = None
    at: str = "mlp"
    router: str = "gate"
    names: tuple[str, ...] = NAMES
    """The tensors of gate, up and down in each expert, where a checkpoint stores each expert by itself."""
    gated: bool = True
    """Whether experts have a gate; without one, `names` has up and down, and `stacked` a tensor
    [experts, inner, hidden] of up.
    """
    stacked: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    """The tensors [experts, 2·inner, hidden] and [experts, hidden, inner] of all experts, where a checkpoint
    stores them in one tensor each.
    """
    transposed: bool = False
    """Whether the matrices in such a tensor are stored input by input, unless its shape is another one."""
    apart: bool = True
    """Whether checkpoints of the type store each expert by itself, as far as their tensors do not tell."""
    shared: Shared | None = None


def read_experts(read: ConfigReader, inner: int, *keys: str, top: str = "num_experts_per_tok") -> Moe:
    """Read how many experts there are, under the first of `keys` that is given, the last being the usual one,
    and how many a token has, under the key `top`. `inner`: the width of an expert.
    """
    for key in TRAINING:
        read.given(key)
    key = next((key for key in keys if read.given(key)), keys[-1])
    experts = read.size(key, most=MAX_EXPERTS)
    return Moe(experts, read.size(top, most=experts), inner)


def experts(
    s: StepBuilder, x: Value, layer: int, m: Moe, hidden: int, router_input: Value | None = None
) -> Value:
    """The experts of a layer, with what every token has beside them: [M, hidden]. `router_input`: what the
    router reads; None: x.
    """
    name, source = f"layers.{layer}", _source(layer, m)
    route = routed(s, router_input or x, layer, m)

    def stacked(transposed: bool) -> list[list[TensorPiece]]:
        return [
            [TensorPiece(f"{source}.{tensor}", rows * m.experts, stack=m.experts, transposed=transposed)]
            for tensor, rows in zip(m.stacked, ((1 + m.gated) * m.inner, hidden), strict=True)
        ]

    apart = [
        each_expert(f"{source}.experts", m.experts, *part)
        for part in ((m.inner, m.names[:-1]), (hidden, m.names[-1:]))
    ]
    whole = stacked(m.transposed)
    other = stacked(False) if m.transposed else apart
    (first, last), (other_first, other_last) = (apart, whole) if m.apart else (whole, other)
    out = s.append(
        ops.Experts(
            s.fresh("experts"), x.name, route.name,
            s.matrix(f"{name}.experts.gate_up", first, x.width, m.experts, otherwise=other_first),
            s.matrix(f"{name}.experts.down", last, m.inner, m.experts, otherwise=other_last), m.activation,
            gated=m.gated,
        )
    )  # fmt: skip
    return out if m.shared is None else s.add(out, _shared(s, x, layer, m.shared, hidden))


def each_expert(
    at: str, count: int, rows: int, names: Sequence[str], kind: str = "weight"
) -> list[TensorPiece]:
    """Pieces of a checkpoint that stores each expert by itself: the tensors `names`, of `rows` rows each, of
    one expert after the other.
    """
    return [TensorPiece(f"{at}.{e}.{name}.{kind}", rows) for e in range(count) for name in names]


def _shared(s: StepBuilder, x: Value, layer: int, shared: Shared, hidden: int) -> Value:
    """The MLP that every token has, times its weight."""
    out = gated_mlp(s, x, layer, shared.mlp, hidden, shared.at)
    if shared.gate is None:
        return out
    piece = TensorPiece(f"model.layers.{layer}.{shared.gate}.weight", 1)
    logit = s.linear(x, f"layers.{layer}.shared_gate", (piece,), floats=True)
    return s.mul(out, s.act(logit, "sigmoid"))


def routed(s: StepBuilder, x: Value, layer: int, m: Moe, biased: bool = False) -> Value:
    """The choice of experts for each row. `biased`: whether the router has a bias."""
    source = _source(layer, m)
    bias, factors = (
        None
        if name is None
        else s.vector(f"layers.{layer}.router.{kind}", (TensorPiece(f"{source}.{name}", m.experts),))
        for kind, name in (("bias_of_choice", m.bias), ("factors", m.factors))
    )
    return s.route(
        x, f"layers.{layer}.router", TensorPiece(f"{source}.{m.router}.weight", m.experts),
        lambda out, logits: ops.Route(out, logits, m.top, m.score, m.normalize, bias, m.scale, factors),
        biased,
    )  # fmt: skip


def _source(layer: int, m: Moe) -> str:
    """The name of the block of a layer in the checkpoint."""
    return f"model.layers.{layer}.{m.at}".removesuffix(".")


Block = Mlp | Moe
"""The second block of a layer: one MLP, or experts."""


def block(s: StepBuilder, x: Value, layer: int, b: Block, hidden: int, at: str = "mlp") -> Value:
    """The second block of a layer: [M, hidden]. `at`: the name of an MLP."""
    return experts(s, x, layer, b, hidden) if isinstance(b, Moe) else gated_mlp(s, x, layer, b, hidden, at)


def sparse_layers(read: ConfigReader, moe: Moe, mlp: Mlp, layers: int) -> Sequence[Block]:
    """The block of each layer of Qwen's models: every `decoder_sparse_step`-th has experts, unless
    `mlp_only_layers` lists it.
    """
    step = read.size("decoder_sparse_step", 1)
    dense = read.indices("mlp_only_layers", layers)
    moe = replace(moe, normalize=0.0 if read.flag("norm_topk_prob") else None)
    return [mlp if i in dense or (i + 1) % step else moe for i in range(layers)]
