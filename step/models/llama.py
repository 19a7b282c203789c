"""Llama (also SmolLM2, TinyLlama and other plain descendants).

Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023); grouped-query attention as in Llama 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nearfar.errors import CheckpointError
from nearfar.step.config import EPSILON, MAX_CONTEXT, MAX_LAYERS, ConfigReader, ModelConfig
from nearfar.step.params import Param

if TYPE_CHECKING:
    from nearfar.build.program.graph import StepGraph


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """Read a llama config.json."""
    read = ConfigReader(config)
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    kv_heads = read.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(f"config.json: {heads} attention heads cannot share {kv_heads} key/value heads evenly")
    read.choice("hidden_act", ("silu",), "silu")
    head_dim, vocab = read.size("head_dim", hidden // heads), read.size("vocab_size")
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim is {head_dim}; rotary embeddings need an even one")
    return ModelConfig(
        architecture="llama",
        hidden_size=hidden,
        intermediate_size=read.size("intermediate_size"),
        layers=read.size("num_hidden_layers", most=MAX_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        context_length=read.size("max_position_embeddings", most=MAX_CONTEXT),
        norm_eps=read.number("rms_norm_eps", 1e-6, *EPSILON),
        rope=read.rope(),
        tied=read.flag("tie_word_embeddings"),
        attention_bias=read.flag("attention_bias"),
        mlp_bias=read.flag("mlp_bias"),
        bos_token_id=next(iter(read.token_ids("bos_token_id", vocab)), None),
        eos_token_ids=read.token_ids("eos_token_id", vocab),
    )


def params(config: ModelConfig) -> list[Param]:
    """Weights in the order in which a step reads them; the checkpoint's names appear here and nowhere else."""
    out = [Param("embed", (("model.embed_tokens.weight", config.vocab_size),), config.hidden_size)]
    for i in range(config.layers):
        out += _layer_params(config, f"layers.{i}", f"model.layers.{i}")
    out.append(Param("norm", (("model.norm.weight", config.hidden_size),)))
    if not config.tied:
        out.append(Param("lm_head", (("lm_head.weight", config.vocab_size),), config.hidden_size))
    return out


def _layer_params(config: ModelConfig, name: str, source: str) -> list[Param]:
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    attn, mlp = f"{source}.self_attn", f"{source}.mlp"
    linears = [
        ("qkv", ((f"{attn}.q_proj", q), (f"{attn}.k_proj", kv), (f"{attn}.v_proj", kv)), hidden, config.attention_bias),
        ("o", ((f"{attn}.o_proj", hidden),), q, config.attention_bias),
        ("gate_up", ((f"{mlp}.gate_proj", inner), (f"{mlp}.up_proj", inner)), hidden, config.mlp_bias),
        ("down", ((f"{mlp}.down_proj", hidden),), inner, config.mlp_bias),
    ]
    norms = {"qkv": "input_layernorm", "gate_up": "post_attention_layernorm"}
    out: list[Param] = []
    for part, sources, k, bias in linears:
        if part in norms:
            out.append(Param(f"{name}.{part}.norm", ((f"{source}.{norms[part]}.weight", hidden),)))
        out.append(Param(f"{name}.{part}", tuple((f"{s}.weight", n) for s, n in sources), k))
        if part == "qkv" and config.qk_norm:
            out += [Param(f"{name}.{which}_norm", ((f"{attn}.{which}_norm.weight", config.head_dim),)) for which in "qk"]
        if bias:
            out.append(Param(f"{name}.{part}.bias", tuple((f"{s}.bias", n) for s, n in sources)))
    return out


def step(graph: StepGraph, config: ModelConfig) -> None:
    """Emit one step: embed, layers, logits."""
    x = graph.embed("embed")
    for i in range(config.layers):
        x = _layer(graph, config, x, i)
    graph.logits(x, "norm", "embed" if config.tied else "lm_head")


def _layer(graph: StepGraph, config: ModelConfig, x: Any, i: int) -> Any:
    name, eps = f"layers.{i}", config.norm_eps
    qkv = graph.linear(graph.norm(x, f"{name}.qkv.norm", eps), f"{name}.qkv")
    attended = graph.attention(graph.rope_append(qkv, i), i)
    x = graph.add(x, graph.linear(attended, f"{name}.o", residual_stream=True))
    gate_up = graph.linear(graph.norm(x, f"{name}.gate_up.norm", eps), f"{name}.gate_up")
    return graph.add(x, graph.linear(graph.silu_gate(gate_up), f"{name}.down", residual_stream=True))
