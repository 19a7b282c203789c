"""Tiny random checkpoints of every architecture, made by transformers' own classes, with odd shapes.

A case is a line in a table: model_type, a name for the case, and the fields of its config. Every test that is
parametrized by `CASES` runs each case; no test names an architecture.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.support import tiny
from tests.support.cases import GLOBAL, LOCAL, MULTIPLIED, OWN, VOCAB, Case, case, inside
from tests.support.recurrent_cases import RECURRENT

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40, "rope_theta": 10000.0}


def longrope(pairs: int, **changes: Any) -> dict[str, Any]:
    """A LongRoPE section for a model whose original context has 40 positions."""
    short, long = [1.0 + 0.02 * i for i in range(pairs)], [1.0 + 0.3 * i for i in range(pairs)]
    return {
        "rope_type": "longrope", "short_factor": short, "long_factor": long, "rope_theta": 10000.0,
        "original_max_position_embeddings": 40, **changes,
    }  # fmt: skip


LLAMAS = [
    case("llama", "plain", head_dim=64, intermediate_size=172),
    case("llama", "tied", head_dim=24, num_attention_heads=3, num_key_value_heads=1,
         tie_word_embeddings=True),
    case("llama", "biased", head_dim=80, attention_bias=True, mlp_bias=True),
    case("llama", "wide", head_dim=256, num_attention_heads=2, num_key_value_heads=1, hidden_act="gelu"),
    case("llama", "linear", rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}),
    case("llama", "llama3", rope_parameters={
        **LLAMA3, "rope_theta": 500000.0, "original_max_position_embeddings": 32}, prompts=(9, 60)),
    case("llama", "yarn", rope_parameters=YARN, prompts=(9, 60)),
    case("llama", "yarn-mscale", rope_parameters={
        **YARN, "mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 16, "truncate": False}, prompts=(60,)),
    case("llama", "longrope-short", rope_parameters=longrope(8), context=40, prompts=(9, 40)),
    case("llama", "longrope-long", rope_parameters=longrope(8), prompts=(45, 90)),
]  # fmt: skip

MISTRALS = [
    case("mistral", "window", sliding_window=24),
    case("mistral", "full", sliding_window=None, head_dim=24),
    case("ministral", "mixed", sliding_window=11, layer_types=[
        "full_attention", "sliding_attention", "sliding_attention"]),
    case("ministral3", "growing", head_dim=32, rope_parameters={
        **YARN, "llama_4_scaling_beta": 0.4, "max_position_embeddings": 160, "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }, prompts=(9, 130)),
]  # fmt: skip

QWENS = [
    case("qwen2", "plain", head_dim=OWN, hidden_size=64, intermediate_size=172, tie_word_embeddings=True),
    case("qwen2", "window", head_dim=OWN, use_sliding_window=True, sliding_window=8, max_window_layers=1,
         hidden_size=48, num_attention_heads=3, num_key_value_heads=3),
    case("qwen3", "plain", head_dim=80, tie_word_embeddings=True),
    case("qwen3", "biased", attention_bias=True, hidden_act="relu2", use_sliding_window=True,
         sliding_window=16, max_window_layers=2),
]  # fmt: skip

SMOLLMS = [
    case("smollm3", "plain", head_dim=OWN, hidden_size=64, num_hidden_layers=5, tie_word_embeddings=True),
    case("smollm3", "window", head_dim=OWN, hidden_size=64, no_rope_layers=[1, 0, 1], use_sliding_window=True,
         sliding_window=9, attention_bias=True, mlp_bias=True),
]  # fmt: skip

PHI3 = {"head_dim": OWN, "hidden_size": 96, "original_max_position_embeddings": 40}
PHIS = [
    case("phi3", "plain", head_dim=OWN, hidden_size=64, sliding_window=20),
    case("phi3", "partial", **PHI3, tie_word_embeddings=True, partial_rotary_factor=0.75,
         num_attention_heads=2),
    case("phi3", "partial-short", **PHI3, rope_parameters=longrope(9, partial_rotary_factor=0.75),
         context=40, prompts=(9, 40)),
    case("phi3", "partial-long", **PHI3, rope_parameters=longrope(9, partial_rotary_factor=0.75),
         prompts=(41, 90)),
    case("phi3", "factor", **PHI3, rope_parameters=longrope(12, factor=3.0), prompts=(41, 90)),
]  # fmt: skip

GRANITES = [
    case("granite", "plain", head_dim=OWN, hidden_size=64, embedding_multiplier=12.0,
         attention_multiplier=0.11, residual_multiplier=0.22, logits_scaling=8.0, tie_word_embeddings=True),
    case("granite", "biased", head_dim=OWN, hidden_size=96, attention_bias=True, mlp_bias=True,
         residual_multiplier=0.5, logits_scaling=3.0),
]  # fmt: skip

ERNIES = [
    case("ernie4_5", "plain", head_dim=24, tie_word_embeddings=True),
    case("ernie4_5", "biased", use_bias=True),
]

HUNYUAN = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10000.0}
HUNYUANS = [
    case("hunyuan_v1_dense", "plain", head_dim=32),
    case("hunyuan_v1_dense", "alpha", rope_parameters=HUNYUAN, attention_bias=True, tie_word_embeddings=True),
]

GLMS = [
    case("glm", "plain", head_dim=24),
    case("glm", "unbiased", attention_bias=False, tie_word_embeddings=True, partial_rotary_factor=0.75),
    case("gemma", "plain", head_dim=24, num_key_value_heads=1, tie_word_embeddings=True),
    case("gemma", "biased", attention_bias=True, hidden_act="gelu"),
]  # fmt: skip

COUSINS = [
    case("seed_oss", "plain", head_dim=24, mlp_bias=True),
    case("seed_oss", "out-biased", attention_bias=False, attention_out_bias=True, tie_word_embeddings=True),
    case("cwm", "plain", sliding_window=11, num_hidden_layers=5, rope_parameters={
        **LLAMA3, "rope_theta": 1e6, "original_max_position_embeddings": 32}),
    case("cwm", "listed", sliding_window=9, mlp_bias=True, tie_word_embeddings=True, layer_types=[
        "sliding_attention", "full_attention", "sliding_attention"], rope_parameters={
        "rope_type": "default", "rope_theta": 1e6}),
    case("arcee", "plain", head_dim=24),
    case("arcee", "biased", attention_bias=True, mlp_bias=True, hidden_act="gelu", tie_word_embeddings=True),
    case("internlm3", "plain", head_dim=16, hidden_size=64, rope_parameters={
        "rope_type": "dynamic", "factor": 6.0, "rope_theta": 10000.0}),
    case("internlm3", "biased", head_dim=16, hidden_size=64, attention_bias=True, mlp_bias=True,
         tie_word_embeddings=True),
    case("iquestcoder", "plain", head_dim=24, rms_norm_eps=OWN),
]  # fmt: skip

HYBRID: dict[str, Any] = {
    "layer_types": ["full_attention"] * 3, "num_local_experts": 0, "num_experts_per_tok": 0,
    "shared_intermediate_size": 100, "head_dim": OWN, "hidden_size": 64, "mamba_n_heads": 4,
}  # fmt: skip
GRANITES += [
    case("granitemoehybrid", "dense", **HYBRID, **MULTIPLIED, position_embedding_type="rope",
         tie_word_embeddings=True),
    case("granitemoehybrid", "still", **{**HYBRID, "shared_intermediate_size": 76}, attention_bias=True,
         residual_multiplier=0.5),
    case("hyperclovax", "plain", **MULTIPLIED, head_dim=24),
    case("hyperclovax", "bare", use_post_norm=False, attention_bias=True, mlp_bias=True,
         residual_multiplier=0.5, logits_scaling=3.0, tie_word_embeddings=True),
]  # fmt: skip

GRANITES += [
    case("granitemoehybrid", "experts", **{**HYBRID, "num_local_experts": 7, "num_experts_per_tok": 3,
         "shared_intermediate_size": 40, "intermediate_size": 28}, **MULTIPLIED,
         position_embedding_type="rope", attention_bias=True, hidden_act="gelu"),
]  # fmt: skip
GPT_OSS_ROPE = {**YARN, "truncate": False, "rope_theta": 150000.0}
MOES = [
    case("olmoe", "plain", head_dim=OWN, num_experts=6, num_experts_per_tok=2),
    case("olmoe", "normalized", head_dim=OWN, hidden_size=64, intermediate_size=32, num_experts=12,
         num_experts_per_tok=5, norm_topk_prob=True, attention_bias=True, tie_word_embeddings=True),
    case("mixtral", "plain", head_dim=OWN, num_local_experts=4, num_experts_per_tok=2),
    case("mixtral", "window", sliding_window=14, num_local_experts=5, num_experts_per_tok=1,
         hidden_act="gelu"),
    case("qwen3_moe", "plain", moe_intermediate_size=20, num_experts=9, num_experts_per_tok=3),
    case("qwen3_moe", "mixed", moe_intermediate_size=44, num_experts=5, num_experts_per_tok=5, head_dim=24,
         norm_topk_prob=True, mlp_only_layers=[1], decoder_sparse_step=1, attention_bias=True,
         use_sliding_window=True, sliding_window=12, tie_word_embeddings=True),
    case("qwen3_moe", "sparse", moe_intermediate_size=20, num_experts=7, num_experts_per_tok=2,
         decoder_sparse_step=2, num_hidden_layers=4),
    case("qwen2_moe", "plain", head_dim=OWN, hidden_size=64, moe_intermediate_size=20, num_experts=9,
         num_experts_per_tok=3, shared_expert_intermediate_size=36),
    case("qwen2_moe", "mixed", head_dim=OWN, moe_intermediate_size=44, num_experts=5, num_experts_per_tok=2,
         shared_expert_intermediate_size=24, norm_topk_prob=True, mlp_only_layers=[2], qkv_bias=False,
         num_hidden_layers=4, use_sliding_window=True, sliding_window=10, max_window_layers=3,
         hidden_act="gelu", tie_word_embeddings=True),
    case("granitemoe", "plain", head_dim=OWN, hidden_size=64, intermediate_size=24, num_local_experts=5,
         num_experts_per_tok=2, embedding_multiplier=12.0, attention_multiplier=0.11,
         residual_multiplier=0.22, logits_scaling=8.0, tie_word_embeddings=True),
    case("granitemoeshared", "plain", **MULTIPLIED, head_dim=OWN, hidden_size=64, intermediate_size=24,
         num_local_experts=5, num_experts_per_tok=2, shared_intermediate_size=36),
    case("gpt_oss", "plain", num_local_experts=4, num_experts_per_tok=2, sliding_window=10, swiglu_limit=1.5,
         rope_parameters=GPT_OSS_ROPE),
    case("gpt_oss", "odd", num_local_experts=7, num_experts_per_tok=3, intermediate_size=37, head_dim=24,
         attention_bias=False, sliding_window=24, swiglu_alpha=1.1, tie_word_embeddings=True,
         layer_types=[GLOBAL, LOCAL, GLOBAL]),
]  # fmt: skip

PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 1, "image_size": 28, "patch_size": 14,
}  # fmt: skip
PARTS = [
    inside("mistral3", MISTRALS[0], PIXTRAL, tie_word_embeddings=False),
    inside("mistral3", MISTRALS[-1], PIXTRAL, tie_word_embeddings=True),
]

LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
ROPE_BY_TYPE: dict[str, dict[str, Any]] = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
YARN_BY_TYPE: dict[str, dict[str, Any]] = {
    "full_attention": {
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5, "original_max_position_embeddings": 40,
        "attention_factor": 1.2, "beta_fast": 32.0, "beta_slow": 1.0,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
}  # fmt: skip
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 8, "num_kv_shared_layers": 3, "head_dim": 16, "global_head_dim": 32,
    "sliding_window": 9, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 12,
    "layer_types": [LOCAL, LOCAL, GLOBAL, LOCAL, GLOBAL, LOCAL, LOCAL, GLOBAL],
}  # fmt: skip

TINY_26B: dict[str, Any] = {
    **{key: value for key, value in GEMMA4.items() if key not in ("num_hidden_layers", "layer_types")},
    "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
}  # fmt: skip

GEMMAS = [
    case(
        "gemma2", "plain", head_dim=24, query_pre_attn_scalar=20, sliding_window=13, tie_word_embeddings=True,
        attn_logit_softcapping=5.0, final_logit_softcapping=12.0, num_hidden_layers=4,
    ),
    case(
        "gemma2", "uncapped", attn_logit_softcapping=None, final_logit_softcapping=None, sliding_window=40,
        attention_bias=True,
    ),
    case(
        "gemma3_text", "plain", head_dim=24, query_pre_attn_scalar=30, sliding_window=12, num_hidden_layers=7,
        tie_word_embeddings=True, rope_parameters=ROPE_BY_TYPE,
    ),
    case("gemma3_text", "listed", head_dim=256, sliding_window=8, layer_types=[GLOBAL, LOCAL, LOCAL]),
    case("olmo2", "plain", head_dim=OWN, attention_bias=True),
    case("olmo2", "grouped", head_dim=24, tie_word_embeddings=True),
    case("olmo3", "yarn", sliding_window=11, num_hidden_layers=5, rope_parameters=YARN_BY_TYPE),
    case("exaone4", "hybrid", sliding_window=10, sliding_window_pattern=3, num_hidden_layers=4,
         rope_parameters=LINEAR),
    case("exaone4", "still", layer_types=[LOCAL, GLOBAL, GLOBAL]),
    case("exaone4", "global", sliding_window=None, layer_types=[GLOBAL] * 3, head_dim=80,
         tie_word_embeddings=True),
    case("glm4", "plain", head_dim=24),
    case("glm4", "unbiased", attention_bias=False, tie_word_embeddings=True),
    case(
        "gemma4_text", "shared", **GEMMA4, use_double_wide_mlp=True, tie_word_embeddings=True,
        final_logit_softcapping=12.0,
    ),
    case("gemma4_text", "own", **{**GEMMA4, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}),
    case(
        "gemma4_text", "twice", **{**GEMMA4, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
        attention_k_eq_v=True, num_global_key_value_heads=1, num_key_value_heads=4,
    ),
    case(
        "gemma4_text", "experts", **TINY_26B,
        num_hidden_layers=3, layer_types=[LOCAL, LOCAL, GLOBAL],
        enable_moe_block=True, num_experts=7, top_k_experts=3, moe_intermediate_size=20,
        attention_k_eq_v=True, num_global_key_value_heads=1, num_key_value_heads=4, tie_word_embeddings=True,
    ),
]  # fmt: skip

SIGLIP = {**PIXTRAL, "model_type": "siglip_vision_model"}
SEEING = [
    inside(
        "gemma3",
        case("gemma3_text", "text", sliding_window=12, num_hidden_layers=6, tie_word_embeddings=True),
        SIGLIP, tie_word_embeddings=True, mm_tokens_per_image=4, image_token_index=260, boi_token_index=258,
        eoi_token_index=259,
    ),
    inside(
        "gemma4", case("gemma4_text", "text", **GEMMA4, tie_word_embeddings=True),
        {**PIXTRAL, "model_type": "gemma4_vision", "num_key_value_heads": 1, "head_dim": 16},
        tie_word_embeddings=True, image_token_id=260, boi_token_id=258, eoi_token_id=259, video_token_id=255,
        audio_token_id=254,
        boa_token_id=253, eoa_token_index=252,
    ),
]  # fmt: skip

PATCHES = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": 64,
    "fullatt_block_indexes": [0],
}  # fmt: skip
"""A vision part of one block, with windows over patches."""
VIT = {key: value for key, value in PIXTRAL.items() if key != "model_type"}


def by_axis(*sections: int, **changes: Any) -> dict[str, Any]:
    """A rotation by row, column and time of an image; `sections`: the number of pairs of each axis."""
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), **changes}


SEEN: dict[str, Any] = {"hidden_size": 64, "head_dim": OWN, "rope_parameters": by_axis(4, 2, 2)}
VISUAL = [
    inside(
        "qwen2_vl", case("qwen2_vl_text", "text", **SEEN),
        {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 1}, tie_word_embeddings=True,
    ),
    inside(
        "qwen2_5_vl",
        case(
            "qwen2_5_vl_text", "text", **SEEN, use_sliding_window=True, sliding_window=9, max_window_layers=1
        ),
        PATCHES,
    ),
    inside(
        "qwen3_vl",
        case(
            "qwen3_vl_text", "text", hidden_size=64, rope_parameters=by_axis(4, 2, 2, mrope_interleaved=True)
        ),
        {**PATCHES, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}, tie_word_embeddings=True,
    ),
    inside("smolvlm", case("llama", "text", head_dim=24, mlp_bias=True), VIT, tie_word_embeddings=True),
    inside("idefics3", case("llama", "text", num_key_value_heads=4), VIT),
    inside("llava", case("llama", "text", attention_bias=True), {**VIT, "model_type": "clip_vision_model"}),
    inside(
        "llava_onevision", case("qwen2", "text", head_dim=OWN, hidden_size=64),
        {**VIT, "model_type": "siglip_vision_model"}, tie_word_embeddings=True,
    ),
    inside(
        "internvl", case("qwen2", "text", head_dim=OWN, hidden_size=64),
        {**VIT, "image_size": [28, 28], "patch_size": [14, 14]}, tie_word_embeddings=False,
    ),
    inside(
        "llava_next", case("mistral", "text", sliding_window=None, head_dim=24),
        {**VIT, "model_type": "clip_vision_model"},
    ),
    inside(
        "llava_next_video", case("qwen2", "text", head_dim=OWN, hidden_size=64),
        {**VIT, "model_type": "clip_vision_model"},
    ),
    inside("vipllava", case("llama", "text", mlp_bias=True), {**VIT, "model_type": "clip_vision_model"}),
    inside(
        "hyperclovax_vision_v2", case("hyperclovax", "text", **MULTIPLIED, head_dim=24),
        {**PATCHES, "model_type": "qwen2_5_vl_vision", "out_hidden_size": 48},
    ),
    inside(
        "qwen3_vl_moe",
        case(
            "qwen3_vl_moe_text", "text", moe_intermediate_size=20, num_experts=5, num_experts_per_tok=3,
            mlp_only_layers=[1], rope_parameters=by_axis(4, 2, 2, mrope_interleaved=True),
        ),
        {**PATCHES, "deepstack_visual_indexes": [0], "num_position_embeddings": 16, "out_hidden_size": 48},
    ),
    inside(
        "exaone4_5", case("exaone4", "text", hidden_size=64, sliding_window=10, sliding_window_pattern=3),
        {**PATCHES, "num_key_value_heads": 1},
    ),
]  # fmt: skip
"""Text models within multimodal models: except for names of tensors, their lists equal those of
other cases.
"""


ATTENDING: tuple[Case, ...] = (
    *LLAMAS, *MISTRALS, *QWENS, *SMOLLMS, *PHIS, *GRANITES, *ERNIES, *HUNYUANS, *GEMMAS, *MOES, *GLMS,
    *COUSINS, *PARTS, *SEEING, *VISUAL,
)  # fmt: skip
"""Cases whose layers keep only keys and values: onnx builds no others."""
CASES: tuple[Case, ...] = (*ATTENDING, *RECURRENT)


@cache
def checkpoint(case: Case) -> Path:
    """The checkpoint directory of a case, made once a process."""
    return make(case, Path(_folder().name) / str(case))


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="nearfar-architectures-")


def make(case: Case, root: Path) -> Path:
    """Write the checkpoint: weights, biases, norms and sinks all random; tokenizer as in tiny.py."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(case.model_type, **case.config)
    torch.manual_seed(sum(map(ord, str(case))))
    model = _auto(case).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        # the model's buffers are saved, too, because some are weights (Gemma 4's layer_scalar)
        saved = model.state_dict()
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in saved:
                randomize(name, tensor)
    model.save_pretrained(root)
    tiny.tokenizer().save(str(root / "tokenizer.json"))
    (root / "chat_template.jinja").write_text(tiny.TEMPLATE)
    return root


def _auto(case: Case) -> Any:
    """The Auto class with which transformers opens the case."""
    import transformers

    return (
        transformers.AutoModelForImageTextToText
        if "text_config" in case.config
        else transformers.AutoModelForCausalLM
    )


def randomize(name: str, parameter: Any) -> None:
    """Fill a parameter with random values: matrices keep the size of their inputs, vectors stay near their
    initial values.
    """
    import torch

    if "embed" in name:
        parameter.normal_(0, 1)
    elif parameter.dim() > 1:
        parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
    else:
        parameter.add_(torch.randn_like(parameter) * 0.3)


def prompt(case: Case, count: int) -> list[int]:
    """A prompt of `count` random bytes."""
    seed = sum(map(ord, str(case))) + count
    return [int(token) for token in np.random.default_rng(seed).integers(0, 256, count)]


@cache
def reference(case: Case, attention: str = "eager") -> Callable[[list[int]], np.ndarray]:
    """A function that gives transformers' logits of every token of a prompt, float32 [tokens, vocab]. Experts
    are computed one by one, because torch's grouped products need even widths.

    `attention`: transformers' implementation. Above 8,000 tokens "sdpa", which supports neither sinks nor
    softcaps, takes a quarter of the time.
    """
    import torch

    model = (
        _auto(case)
        .from_pretrained(checkpoint(case), dtype=torch.float32, attn_implementation=attention, **eager(case))
        .eval()
    )

    def logits(tokens: list[int]) -> np.ndarray:
        with torch.no_grad():
            # transformers makes no cache for a model whose layers all keep a state
            return np.asarray(model(torch.tensor([tokens]), use_cache=False).logits[0].float().numpy())

    return logits


def eager(case: Case) -> dict[str, str]:
    """Options of transformers' from_pretrained for a case: experts are computed one by one."""
    return {"experts_implementation": "eager"} if case.experts else {}
