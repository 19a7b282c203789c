"""Checkpoints whose activations go beyond float16, or have a few channels thousands of times as large as all
others.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.support.architectures import make
from tests.support.cases import case

GROWTH = {"residual": ("layernorm.weight", 12000.0, 1.0), "gated": ("_proj.weight", 0.0, 200.0)}
"""Weights whose results go beyond float16, in post-norms or in gate and up: the end of their names, what is
added to them, and their factor.
"""


class Massive:
    """A checkpoint in which sums of layers, or the products of gates, go beyond float16, as they do in
    Gemma.
    """

    def __init__(self, path: Path, where: str) -> None:
        from safetensors.numpy import load_file, save_file

        self.path, self._where = path, where
        make(
            case("gemma3_text", "massive", sliding_window=12, num_hidden_layers=6, tie_word_embeddings=True),
            path,
        )
        ending, more, times = GROWTH[where]
        weights = load_file(path / "model.safetensors")
        for name, value in weights.items():
            if name.endswith(ending) and any(part in name for part in (".post_", ".gate_", ".up_")):
                weights[name] = (value * np.float32(times) + np.float32(more)).astype(np.float32)
        save_file(weights, path / "model.safetensors", {"format": "pt"})
        self.tokens = [int(token) for token in np.random.default_rng(0).integers(0, 256, 40)]

    def logits(self) -> np.ndarray:
        """transformers' logits after the tokens, in float32; it is checked that float16 would not have
        held what they came from.
        """
        import torch
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32).eval()
        seen: list[float] = []
        for layer in model.model.layers:
            watched = layer if self._where == "residual" else layer.mlp.down_proj
            watched.register_forward_pre_hook(lambda _, given: seen.append(float(given[0].abs().max())))
        with torch.no_grad():
            expected = model(torch.tensor([self.tokens])).logits[0, -1].numpy()
        assert max(seen) > 1.5 * 65504, "the test must need more than float16 holds"
        return np.asarray(expected)


OUTLIERS = {5: 2003.7, 37: 2741.3, 50: -4745.0}
"""Channels of the residual stream, and what they are in the tokens, once to twice, beside all others, which
are about 1. They add up to nothing.
"""


def outlying(path: Path, quantized: bool) -> Path:
    """A checkpoint in which a few channels are thousands of times as large as all others, as massive
    activations are, and add nothing: what is rounded of them is seen in every output.

    They have the same weight, or where matrices will be `quantized`, which changes the sizes, none: it is the
    least of its group, and so far from the middle of its codes.
    """
    from safetensors.numpy import load_file, save_file

    plain = case(
        "llama", "outliers", vocab_size=264, hidden_size=128, intermediate_size=192, head_dim=32,
        rms_norm_eps=1e-6,
    )  # fmt: skip
    make(plain, path)
    channels, sizes = list(OUTLIERS), np.array(list(OUTLIERS.values()))
    rng = np.random.default_rng(0)
    weights = load_file(path / "model.safetensors")
    for name, value in weights.items():
        if "embed" in name:
            value[:, channels] = rng.uniform(1, 2, (len(value), 1)) * sizes
        elif "norm" in name:
            value[:] = (
                20 if quantized else 200
            )  # makes up for what the norm leaves of the other channels beside the few large ones
        elif "o_proj" in name or "down_proj" in name:
            value[channels] = 0
        elif quantized:
            value[:, :64] = np.abs(value[:, :64])
            value[:, channels] = 0
        else:
            value[:, channels] = 0.5
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path
