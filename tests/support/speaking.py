"""A tiny checkpoint with a known answer: a Llama in which each token alone determines the next one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.support import tiny

CONFIG: dict[str, Any] = {
    **tiny.CONFIG, "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 96,
    "head_dim": 16, "num_attention_heads": 8, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
START, END = "<|assistant|>", "<|end|>"


def make(
    path: Path,
    says: str = "Hi!",
    config: Mapping[str, Any] | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint that answers `says`, END, and `says` again, whatever the prompt is.

    `says`: different ASCII characters. `config`, `tokenizer_config`, `tokenizer`: entries that these files
    get in addition or instead; None removes an entry.
    """
    path.mkdir(parents=True, exist_ok=True)
    ids = tiny.tokenizer().get_vocab(True)
    line = [ids[START], *(ids[char] for char in says), ids[END]]
    weights = tiny.weights(CONFIG)
    embed = weights["model.embed_tokens.weight"]
    embed *= CONFIG["hidden_size"] ** 0.5 / np.linalg.norm(embed, axis=1, keepdims=True)
    for name, value in weights.items():
        if "o_proj" in name or "down_proj" in name:
            value[:] = 0  # zeros, so that a row sees only the last token
    head = np.random.default_rng(1).normal(0, 0.1, embed.shape).astype(np.float32)
    for now, then in [*itertools.pairwise(line), (line[-1], line[1])]:
        head[then] += embed[now]
    weights["lm_head.weight"] = head
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    files: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any] | None]] = (
        ("config.json", CONFIG, config),
        ("tokenizer_config.json", {"bos_token": "<|bos|>", "eos_token": END, "chat_template": tiny.TEMPLATE,
                                   "tokenizer_class": "PreTrainedTokenizerFast"}, tokenizer_config),
        ("tokenizer.json", json.loads(tiny.tokenizer().to_str()), tokenizer),
    )  # fmt: skip
    for name, plain, said in files:
        content = {**plain, **(said or {})}
        for key in [key for key, value in (said or {}).items() if value is None]:
            del content[key]
        (path / name).write_text(json.dumps(content))
    return path
