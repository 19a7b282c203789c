"""The shape of a model, read from a Hugging Face config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.errors import CheckpointError


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base frequency and how long contexts stretch it (`default`, `linear`, `llama3`)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def inv_freq(self, head_dim: int) -> npt.NDArray[np.float32]:
        """Frequencies f32 [head_dim/2], as transformers computes them (`modeling_rope_utils`, in float32)."""
        exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        freq: npt.NDArray[np.float32] = (1.0 / np.power(np.float32(self.theta), exponent)).astype(np.float32)
        if self.kind == "linear":
            return (freq / np.float32(self.factor)).astype(np.float32)
        if self.kind == "llama3":
            return self._llama3(freq)
        return freq

    def _llama3(self, freq: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Llama 3.1's rule: long wavelengths are slowed by `factor`, short ones kept, those between blended."""
        wavelength = 2 * math.pi / freq
        low, high = self.original_context / self.low_freq_factor, self.original_context / self.high_freq_factor
        smooth = (self.original_context / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        blended = (1 - smooth) * freq / self.factor + smooth * freq
        scaled = np.where(wavelength > low, freq / self.factor, np.where(wavelength < high, freq, blended))
        return scaled.astype(np.float32)


@dataclass(frozen=True)
class ModelConfig:
    """What the graph, the plan and the manifest need to know of a model.

    `sliding_window`: how many positions, its own included, a layer of type "sliding_attention" attends to; `layer_types`
    has "sliding_attention" or "full_attention" for each layer, or is empty: all full.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope: RopeConfig
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()
    qk_norm: bool = False
    """Each head of queries and keys is normalized before it is rotated (with norm_eps)."""

    @property
    def qkv_size(self) -> int:
        """Columns of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


class ConfigReader:
    """Reads keys of a config.json; every complaint names the key, its value and the file."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a key, `default` where absent or null."""
        value = self._config.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise CheckpointError(f"config.json: {key} is {value!r}; expected a positive integer")
        return value

    def number(self, key: str, default: float) -> float:
        """A positive finite number."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise CheckpointError(f"config.json: {key} is {value!r}; expected a positive number")
        return float(value)

    def rope(self) -> RopeConfig:
        """Rope of either spelling: `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling`."""
        scaling = dict(self.get("rope_parameters") or self.get("rope_scaling") or {})
        theta = scaling.get("rope_theta", self.get("rope_theta", 10000.0))
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in ("default", "linear", "llama3"):
            raise CheckpointError(f"config.json: rope type {kind!r} is not supported; known: default, linear, llama3")
        return RopeConfig(
            theta=float(theta),
            kind=kind,
            factor=float(scaling.get("factor", 1.0)),
            low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
            high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
            original_context=int(
                scaling.get("original_max_position_embeddings", self.get("max_position_embeddings", 8192))
            ),
        )

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id, a list of them, or none."""
        value = self.get(key)
        if value is None:
            return ()
        return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)
