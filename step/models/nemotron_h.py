"""Nemotron-H: layers of one block each, which is Mamba-2, attention without positions, an MLP without a gate,
or experts without gates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nearfar.step.builder import StepBuilder, Value
from nearfar.step.config import EPSILON, MAX_LAYERS, ConfigReader
from nearfar.step.decoder import Attention, Mlp, attention, read_activation, read_decoder
from nearfar.step.experts import MAX_EXPERTS, Moe, experts
from nearfar.step.mamba import Mamba, check_groups, mamba, read_limits
from nearfar.step.model import Model
from nearfar.step.models.arcee import plain_mlp
from nearfar.step.params import TensorPiece

LETTERS = {"M": "mamba", "-": "mlp", "*": "attention", "E": "moe"}
NAMES = {"linear_attention": "mamba", "full_attention": "attention"}
"""transformers' names of layers, for those of published files."""
IDLE = (
    "expand", "chunk_size", "time_step_max", "time_step_floor", "rescale_prenorm_residual",
    "residual_in_fp32", "mamba_ssm_cache_dtype", "use_mamba_kernels", "num_logits_to_keep", "mamba_proj_bias",
    "n_shared_experts", "moe_shared_expert_overlap", "output_router_logits", "mtp_layers_block_type",
    "mtp_hybrid_override_pattern", "num_nextn_predict_layers", "num_hidden_layers",
)  # fmt: skip
"""Keys that change nothing: sizes that follow from others, first values, the order of computation, and layers
that draft tokens (their tensors are left out).
"""
OF_EXPERTS = (
    "n_routed_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size",
    "num_experts_per_tok", "routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob",
)  # fmt: skip
"""Keys that change nothing in a model without experts."""
MOE = Moe(
    0, 0, 0, score="sigmoid", bias="gate.e_score_correction_bias", at="mixer", names=("up_proj", "down_proj"),
    gated=False, stacked=("experts.up_proj", "experts.down_proj"),
)  # fmt: skip


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json. The checkpoint's tensors begin with `backbone.`."""
    types = _types(read)
    c = read_decoder(read.filled({"num_hidden_layers": len(types), "intermediate_size": 1}), context)
    for key in IDLE:
        read.given(key)
    for key in ("sliding_window", "attention_bias"):
        if read.config.get(key):
            read.refuse(key, "nothing: it is not supported")
        read.given(key)
    eps = read.number("layer_norm_epsilon", 1e-5, *EPSILON)
    activation, bias = read_activation(read, "mlp_hidden_act", "relu2"), read.flag("mlp_bias")
    mlp = Mlp(read.size("intermediate_size", 21504), activation, bias, names=("up_proj",))
    moe = _moe(read, mlp) if "moe" in types else None
    for key in OF_EXPERTS:
        read.given(key)
    mixer = _mixer(read, eps)
    attend = Attention(c.heads, c.kv_heads, c.head_dim)
    s = StepBuilder()
    x = s.embed("model.embeddings.weight", c.vocab, c.hidden)
    for i, kind in enumerate(types):
        h = s.norm(x, f"model.layers.{i}.norm.weight", eps)
        if kind == "mamba":
            h = mamba(s, h, i, mixer, c.hidden, "mixer")
        elif kind == "attention":
            h = attention(s, h, i, attend, c.hidden, "mixer")
        elif kind == "moe":
            assert moe is not None
            h = _experts(s, h, i, moe, c.hidden)
        else:
            h = plain_mlp(s, h, i, mlp, c.hidden, "mixer")
        x = s.add(x, h)
    s.logits(s.norm(x, "model.norm_f.weight", eps), "lm_head.weight", c.vocab, c.tied)
    return c.model("nemotron_h", s.finish()).renamed(_published)


def _published(name: str) -> str:
    """The name that a tensor has in checkpoints."""
    return name if name.startswith("lm_head.") else f"backbone.{name.removeprefix('model.')}"


def _types(read: ConfigReader) -> list[str]:
    """The block of each layer, from a list or from a word with a letter for each."""
    key = next((key for key in ("layers_block_type", "layer_types") if read.given(key)), None)
    pattern = "hybrid_override_pattern"
    if key is None and read.given(pattern):
        word = read.config[pattern]
        if not isinstance(word, str) or not word or not set(word) <= set(LETTERS):
            read.refuse(pattern, f"a word of {', '.join(LETTERS)}")
        key, found = pattern, [LETTERS[letter] for letter in word]
    elif key is None:
        raise read.error(f"it has neither layers_block_type nor {pattern}")
    else:
        given = read.config[key]
        if not isinstance(given, list) or not 0 < len(given) <= MAX_LAYERS:
            read.refuse(key, "a list of the types of layers")
        found = [NAMES.get(kind, kind) if isinstance(kind, str) else "" for kind in given]
    read.given(pattern)
    if others := set(found) - set(LETTERS.values()):
        read.refuse(key, f"layers of {', '.join(LETTERS.values())}, not {', '.join(sorted(others))}")
    return found


@dataclass(frozen=True)
class _Moe:
    """Experts without a gate. `latent`: how wide their input and output are; None: as the stream."""

    experts: Moe
    shared: Mlp
    latent: int | None


def _moe(read: ConfigReader, mlp: Mlp) -> _Moe:
    """Read the experts. Scores choose of all experts: of a model in whose layers whole groups of experts are
    left out first, the choice is not supported.
    """
    groups, kept = read.size("n_group", 1), read.size("topk_group", 1)
    if kept < groups:
        read.refuse("topk_group", f"{groups}, as n_group: experts of some groups cannot be left out")
    count = read.size("n_routed_experts", 8, MAX_EXPERTS)
    routed = replace(
        MOE, experts=count, top=read.size("num_experts_per_tok", 2, count),
        inner=read.size("moe_intermediate_size", 7688), activation=mlp.activation,
        normalize=1e-20 if read.flag("norm_topk_prob", True) else None,
        scale=read.number("routed_scaling_factor", 1.0, 1e-6, 1e6),
    )  # fmt: skip
    shared = replace(mlp, inner=read.size("moe_shared_expert_intermediate_size", 7688))
    latent = read.size("moe_latent_size") if read.config.get("moe_latent_size") is not None else None
    return _Moe(routed, shared, latent)


def _experts(s: StepBuilder, x: Value, layer: int, m: _Moe, hidden: int) -> Value:
    """The experts of a layer, between two projections if they are narrower, and the MLP of all tokens."""
    source, name, bias = f"model.layers.{layer}.mixer", f"layers.{layer}", m.shared.bias

    def project(value: Value, which: str, rows: int) -> Value:
        piece = TensorPiece(f"{source}.{which}_latent_proj.weight", rows)
        return s.linear(value, f"{name}.{which}_latent", (piece,), bias)

    if m.latent is None:
        out = experts(s, x, layer, m.experts, hidden)
    else:
        narrow = project(x, "fc1", m.latent)
        out = project(experts(s, narrow, layer, m.experts, m.latent, x), "fc2", hidden)
    return s.add(out, plain_mlp(s, x, layer, m.shared, hidden, "mixer.shared_experts"))


def _mixer(read: ConfigReader, eps: float) -> Mamba:
    """The mixer of Mamba's layers. transformers takes `time_step_min` for the least dt, not the limits."""
    bias = read.flag("use_bias")
    read_limits(read)
    mixer = Mamba(
        read.size("mamba_num_heads", 128), read.size("mamba_head_dim", 64), read.size("n_groups", 8),
        read.size("ssm_state_size", 128), read.size("conv_kernel", 4),
        read_activation(read, "mamba_hidden_act"), eps, (read.number("time_step_min", 0.001, 0.0, 1e6), None),
        conv_bias=read.flag("use_conv_bias", True), in_bias=bias, out_bias=bias,
    )  # fmt: skip
    return check_groups(read, mixer)
