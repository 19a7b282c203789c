"""Tiny random checkpoints of every architecture, made by transformers' own classes, with shapes that are odd.

A family is a line in a table: model_type, a name for the case, and what its config says. What is here is tested
everywhere that is parametrized by `CASES`; no test names an architecture.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.support import tiny

VOCAB = 261  # of the byte tokenizer


@dataclass(frozen=True)
class Case:
    """A tiny config. `window`: the shortest of its windows, so that prompts can be longer; `context` for the build."""

    model_type: str
    name: str
    config: Mapping[str, Any] = field(hash=False)
    window: int | None = None
    context: int | None = None
    prompts: tuple[int, ...] = (9, 45)
    """Tokens in a prompt: below and beyond every window (and what a stretched rope was trained for)."""

    def __str__(self) -> str:
        return f"{self.model_type}-{self.name}"


BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 160, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 0,
}  # fmt: skip


def case(
    model_type: str, name: str, *, context: int | None = None, prompts: tuple[int, ...] = (9, 45),
    nulls: tuple[str, ...] = (), **config: Any,
) -> Case:  # fmt: skip
    """BASE with what is said; a key that is None in `config` is left to the class, one of `nulls` is null."""
    merged = {key: value for key, value in {**BASE, **config}.items() if value is not None} | dict.fromkeys(nulls)
    windows = [merged[key] for key in ("sliding_window",) if isinstance(merged.get(key), int)]
    return Case(model_type, name, merged, min(windows, default=None), context, prompts)


ROPE: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
}

LLAMAS = [
    case("llama", "plain", head_dim=64, intermediate_size=172),
    case("llama", "tied", head_dim=24, num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=True),
    case("llama", "biased", head_dim=80, attention_bias=True, mlp_bias=True),
    case("llama", "linear", rope_parameters=ROPE["linear"]),
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
LOCAL, GLOBAL = "sliding_attention", "full_attention"
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 8, "num_kv_shared_layers": 3, "head_dim": 16, "global_head_dim": 32, "sliding_window": 9,
    "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 12,
    "layer_types": [LOCAL, LOCAL, GLOBAL, LOCAL, GLOBAL, LOCAL, LOCAL, GLOBAL],
}  # fmt: skip

VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


def seeing(model_type: str, text: Case, **config: Any) -> Case:
    """The multimodal model around a text model."""
    vision = {"vision_config": {**VISION, "model_type": config.pop("vision")}}
    inner = {**text.config, "model_type": text.model_type}
    return replace(text, model_type=model_type, config={"text_config": inner, **vision, **config})


GEMMAS = [
    case(
        "gemma2", "plain", head_dim=24, query_pre_attn_scalar=20, sliding_window=13, tie_word_embeddings=True,
        attn_logit_softcapping=5.0, final_logit_softcapping=12.0, num_hidden_layers=4,
    ),
    case(
        "gemma2", "uncapped", nulls=("attn_logit_softcapping", "final_logit_softcapping"), sliding_window=40,
        attention_bias=True,
    ),
    case(
        "gemma3_text", "plain", head_dim=24, query_pre_attn_scalar=30, sliding_window=12, num_hidden_layers=7,
        tie_word_embeddings=True, rope_parameters=ROPE_BY_TYPE,
    ),
    case("gemma3_text", "listed", head_dim=256, sliding_window=8, layer_types=[GLOBAL, LOCAL, LOCAL]),
    case("olmo2", "plain", head_dim=None, attention_bias=True),
    case("olmo2", "grouped", head_dim=24, tie_word_embeddings=True),
    case("olmo3", "yarn", sliding_window=11, num_hidden_layers=5, rope_parameters=YARN_BY_TYPE),
    case("exaone4", "hybrid", sliding_window=10, sliding_window_pattern=3, num_hidden_layers=4, rope_parameters=LINEAR),
    case("exaone4", "global", nulls=("sliding_window",), layer_types=[GLOBAL] * 3, head_dim=80, tie_word_embeddings=True),
    case("glm4", "plain", head_dim=24),
    case("glm4", "unbiased", attention_bias=False, tie_word_embeddings=True),
    case(
        "gemma4_text", "shared", **GEMMA4, use_double_wide_mlp=True, tie_word_embeddings=True,
        final_logit_softcapping=12.0,
    ),
    case("gemma4_text", "own", **{**GEMMA4, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}),
    seeing(
        "gemma3", case("gemma3_text", "text", sliding_window=12, num_hidden_layers=6, tie_word_embeddings=True),
        vision="siglip_vision_model", mm_tokens_per_image=4, image_token_index=260, boi_token_index=258,
        eoi_token_index=259,
    ),
    seeing(
        "gemma4", case("gemma4_text", "text", **GEMMA4, tie_word_embeddings=True), vision="gemma4_vision",
        image_token_id=260, boi_token_id=258, eoi_token_id=259, video_token_id=255, audio_token_id=254,
        boa_token_id=253, eoa_token_index=252,
    ),
]  # fmt: skip

CASES: tuple[Case, ...] = (*LLAMAS, *GEMMAS)


@cache
def checkpoint(case: Case) -> Path:
    """Its checkpoint directory, made once a process."""
    return make(case, Path(_folder().name) / str(case))


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="nearfar-architectures-")


def make(case: Case, root: Path) -> Path:
    """Write the checkpoint: weights, biases, norms and sinks all random; tokenizer and template as in tiny.py."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(case.model_type, **case.config)
    torch.manual_seed(sum(map(ord, str(case))))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        saved = model.state_dict()  # with buffers, some of which are weights (Gemma 4's layer_scalar)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in saved:
                randomize(name, tensor)
    model.save_pretrained(root)
    tiny.tokenizer().save(str(root / "tokenizer.json"))
    (root / "chat_template.jinja").write_text(tiny.TEMPLATE)
    return root


def randomize(name: str, parameter: Any) -> None:
    """Matrices that keep the size of what they are given, vectors around what the class has initialized them to."""
    import torch

    if "embed" in name:
        parameter.normal_(0, 1)
    elif parameter.dim() > 1:
        parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
    else:
        parameter.add_(torch.randn_like(parameter) * 0.3)


def prompt(case: Case, count: int) -> list[int]:
    """Random bytes."""
    seed = sum(map(ord, str(case))) + count
    return [int(token) for token in np.random.default_rng(seed).integers(0, 256, count)]


@cache
def reference(case: Case) -> Callable[[list[int]], np.ndarray]:
    """transformers' own logits of every token of a prompt: float32 [tokens, vocab]."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint(case), dtype=torch.float32, attn_implementation="eager"
    ).eval()

    def logits(tokens: list[int]) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(model(torch.tensor([tokens])).logits[0].float().numpy())

    return logits
