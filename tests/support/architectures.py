"""Tiny random checkpoints of every architecture, made by transformers' own classes, with shapes that are odd.

A family is a line in a table: model_type, a name for the case, and what its config says. What is here is tested
everywhere that is parametrized by `CASES`; no test names an architecture.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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


def case(model_type: str, name: str, *, context: int | None = None, prompts: tuple[int, ...] = (9, 45), **config: Any) -> Case:
    """BASE with what is said; a key that is None in `config` is left to the class."""
    merged = {key: value for key, value in {**BASE, **config}.items() if value is not None}
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

CASES: tuple[Case, ...] = (*LLAMAS,)


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
        for name, parameter in model.named_parameters():
            randomize(name, parameter)
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
