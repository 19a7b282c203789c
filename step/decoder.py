"""What decoder-only models share: the facts of config.json, and the two blocks of a layer.

A model file (models/) reads a `Decoder`, describes each of its layers, and writes the layers out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nearfar.step.builder import StepBuilder, Value
from nearfar.step.config import EPSILON, LAYER_TYPES, MAX_CONTEXT, MAX_LAYERS, ConfigReader
from nearfar.step.model import Model, Step
from nearfar.step.operation import Activation
from nearfar.step.ops import Attend, RopeAppend
from nearfar.step.params import RotaryOrder, TensorPiece
from nearfar.step.rope import Rotation

HEAD_DIMS = (2, 1024)
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
    "gelu": "gelu_erf", "relu2": "relu2",
}  # fmt: skip
"""Activations that have kernels, by the names that transformers gives them."""


@dataclass(frozen=True)
class Decoder:
    """The facts in every decoder's config.json, under transformers' names. Sizes are numbers of values."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    eps: float
    tied: bool
    bos: int | None
    eos: tuple[int, ...]

    def model(self, architecture: str, step: Step) -> Model:
        """The model that `step` computes, with these facts."""
        return Model(architecture, self.vocab, self.context, self.bos, self.eos, step)


def read_decoder(
    read: ConfigReader,
    context: int | None,
    *,
    tied: bool = False,
    head_dim: int | None = None,
    eps: float = 1e-6,
) -> Decoder:
    """Read the facts that all decoders share.

    `context`: the most positions of the model. `tied`, `head_dim`, `eps`: defaults for keys that config.json
    lacks.
    """
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    kv_heads = read.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise read.error(f"{heads} attention heads cannot share {kv_heads} key/value heads evenly")
    width = read.size("head_dim", head_dim or hidden // heads, most=HEAD_DIMS[1], least=HEAD_DIMS[0])
    if width % 2:
        read.refuse("head_dim", "an even number: rotary embeddings turn pairs")
    vocab = read.size("vocab_size")
    longest = read.size("max_position_embeddings", most=MAX_CONTEXT)
    return Decoder(
        hidden=hidden,
        inner=read.size("intermediate_size"),
        layers=read.size("num_hidden_layers", most=MAX_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        vocab=vocab,
        context=longest if context is None else min(longest, context),
        eps=read.number("rms_norm_eps", eps, *EPSILON),
        tied=read.flag("tie_word_embeddings", tied),
        bos=next(iter(read.token_ids("bos_token_id", vocab)), None),
        eos=read.token_ids("eos_token_id", vocab),
    )


def read_activation(read: ConfigReader, key: str = "hidden_act", default: str = "silu") -> Activation:
    """The activation that config.json names for the gated MLP."""
    return ACTIVATIONS[read.choice(key, tuple(ACTIVATIONS), default)]


def read_windows(
    read: ConfigReader, layers: int, default: Sequence[str], allowed: bool = True
) -> tuple[int | None, ...]:
    """For each layer the number of positions that it attends to; None: all of them.

    `default`: the types of layers if config.json lists none. `allowed`: whether windows are switched on.
    """
    types = read.choices("layer_types", LAYER_TYPES, default)
    window = read.size("sliding_window", most=MAX_CONTEXT) if read.given("sliding_window") else None
    if "sliding_attention" not in types:
        return (None,) * layers
    if window is None or not allowed:
        read.refuse("layer_types", "full_attention alone: there is no sliding_window, or it is switched off")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


@dataclass(frozen=True)
class Attention:
    """How a layer attends. `scale`: None means head_dim ** −0.5. `rope`: the name of its table; None: no
    rotation.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: str | None = None
    order: RotaryOrder | None = None
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    bias_scale: float = 1.0
    """A factor of the biases."""
    q_norm: str | None = None
    """Name of the layer's norm of q, such as "q_norm"; `k_norm` likewise for k."""
    k_norm: str | None = None
    norm_eps: float = 0.0
    norm_all: bool = False
    norm_after: bool = False
    norm_offset: float = 0.0
    v_norm: float | None = None
    q_scale: tuple[float, float] | None = None
    names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """Names of the projections; one name if the checkpoint stores them in one tensor."""
    o_name: str = "o_proj"
    sinks: str | None = None
    """Name of the vector of the heads' sinks."""


def order_of(rotation: Rotation, head_dim: int, interleaved: bool = False) -> RotaryOrder | None:
    """The order of rows that a table needs; None if the rows stay as they are."""
    order = RotaryOrder(head_dim, rotation.rotary, interleaved)
    return None if order.trivial else order


def attention(
    s: StepBuilder,
    x: Value,
    layer: int,
    a: Attention,
    hidden: int,
    at: str = "self_attn",
    cache: int | None = None,
) -> Value:
    """Self-attention of a layer: projections, rotation, cache, attention, output [M, hidden].

    `cache`: the index of another layer's cache, which this layer only reads.
    """
    source, name = f"model.layers.{layer}.{at}", f"layers.{layer}"
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    own = cache is None
    qkv = s.linear(
        x,
        f"{name}.qkv" if own else f"{name}.q",
        _qkv(a, source, q, kv if own else 0),
        a.qkv_bias,
        a.bias_scale,
    )
    at_cache = s.cache(a.kv_heads, a.head_dim, a.window) if cache is None else cache
    norms = {
        which: s.vector(
            f"{name}.{which}_norm", _norm_pieces(a, f"{source}.{tensor}.weight", width), a.norm_offset
        )
        for which, tensor, width in (("q", a.q_norm, q), ("k", a.k_norm if own else None, kv))
        if tensor is not None
    }
    turned = s.append(
        RopeAppend(
            s.fresh("q"), qkv.name, at_cache, a.heads, a.rope, norms.get("q"), norms.get("k"),
            a.norm_eps if norms else 0.0, a.norm_all, a.norm_after, a.q_scale, a.v_norm if own else None, own,
        )
    )  # fmt: skip
    sinks = None
    if a.sinks is not None:
        sinks = s.vector(f"{name}.{a.sinks}", (TensorPiece(f"{source}.{a.sinks}", a.heads),))
    scale = a.head_dim**-0.5 if a.scale is None else a.scale
    attended = s.append(
        Attend(s.fresh("attended"), turned.name, at_cache, a.heads, scale, a.window, a.softcap, sinks)
    )
    last = TensorPiece(f"{source}.{a.o_name}.weight", hidden)
    return s.linear(attended, f"{name}.o", (last,), a.o_bias, a.bias_scale)


def _qkv(a: Attention, source: str, q: int, kv: int) -> list[TensorPiece]:
    """The pieces of the joined projection to q, k and v; they share a tensor if the checkpoint joins the
    projections.
    """
    rows = [(q, a.order), *([(kv, a.order), (kv, None)] if kv else [])]
    if len(a.names) > 1:
        return [
            TensorPiece(f"{source}.{n}.weight", count, 0, order)
            for n, (count, order) in zip(a.names, rows, strict=False)
        ]
    pieces, start = [], 0
    for count, order in rows:
        pieces.append(TensorPiece(f"{source}.{a.names[0]}.weight", count, start, order))
        start += count
    return pieces


def _norm_pieces(a: Attention, tensor: str, width: int) -> tuple[TensorPiece, ...]:
    """The weight of a norm of q or k, in the order of the projection's rows."""
    return (TensorPiece(tensor, width if a.norm_all else a.head_dim, 0, a.order),)


@dataclass(frozen=True)
class Mlp:
    """A gated MLP. `names`: the tensors of gate and up, or one tensor that holds both. `bias_scale`: a factor
    of the biases.
    """

    inner: int
    activation: Activation = "silu"
    bias: bool = False
    names: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    bias_scale: float = 1.0


def gated_mlp(s: StepBuilder, x: Value, layer: int, m: Mlp, hidden: int, at: str = "mlp") -> Value:
    """activation(x·gate)·(x·up)·down of a layer: [M, hidden]."""
    source, name = f"model.layers.{layer}.{at}", f"layers.{layer}"
    if len(m.names) > 1:
        pieces = [TensorPiece(f"{source}.{part}.weight", m.inner) for part in m.names]
    else:
        pieces = [TensorPiece(f"{source}.{m.names[0]}.weight", m.inner, start) for start in (0, m.inner)]
    inner = s.glu(s.linear(x, f"{name}.gate_up", pieces, m.bias, m.bias_scale), m.activation)
    down = (TensorPiece(f"{source}.{m.down}.weight", hidden),)
    return s.linear(inner, f"{name}.down", down, m.bias, m.bias_scale)
