"""Nemotron-H: layers of one block each, which is Mamba-2, attention without positions, or an MLP without a
gate.
"""

from __future__ import annotations

from nearfar.step.builder import StepBuilder
from nearfar.step.config import EPSILON, MAX_LAYERS, ConfigReader
from nearfar.step.decoder import Attention, Mlp, attention, read_activation, read_decoder
from nearfar.step.mamba import Mamba, check_groups, mamba, read_limits
from nearfar.step.model import Model
from nearfar.step.models.arcee import plain_mlp

LETTERS = {"M": "mamba", "-": "mlp", "*": "attention", "E": "moe"}
NAMES = {"linear_attention": "mamba", "full_attention": "attention"}
"""transformers' names of layers, for those of published files."""
IDLE = (
    "expand", "chunk_size", "time_step_max", "time_step_floor", "rescale_prenorm_residual",
    "residual_in_fp32", "mamba_ssm_cache_dtype", "use_mamba_kernels", "num_logits_to_keep", "mamba_proj_bias",
    "n_routed_experts", "n_shared_experts", "moe_intermediate_size",
    "moe_shared_expert_intermediate_size", "moe_shared_expert_overlap", "moe_latent_size",
    "num_experts_per_tok", "routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob",
    "output_router_logits", "mtp_layers_block_type", "mtp_hybrid_override_pattern", "num_hidden_layers",
)  # fmt: skip
"""Keys that change nothing in a model without experts: sizes that follow from others, and first values."""


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json. The checkpoint's tensors begin with `backbone.`."""
    types = _types(read)
    c = read_decoder(read.filled({"num_hidden_layers": len(types), "intermediate_size": 1}), context)
    for key in IDLE:
        read.given(key)
    for key in ("num_nextn_predict_layers", "sliding_window", "attention_bias"):
        if read.config.get(key):
            read.refuse(key, "nothing: it is not supported")
        read.given(key)
    eps = read.number("layer_norm_epsilon", 1e-5, *EPSILON)
    activation, bias = read_activation(read, "mlp_hidden_act", "relu2"), read.flag("mlp_bias")
    mlp = Mlp(read.size("intermediate_size", 21504), activation, bias, names=("up_proj",))
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
    if "moe" in found:
        read.refuse(key, "layers of mamba, mlp and attention: experts without a gate are not supported")
    return found


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
