"""The shape of a model, read from a Hugging Face config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Never

import numpy as np
import numpy.typing as npt

from nearfar.errors import CheckpointError

LARGEST = 2**31 - 1  # of any size: offsets in kernels are 32 bits wide
MAX_LAYERS = 4096
MAX_CONTEXT = 1 << 24  # positions; a page table of it takes 64 MiB
EPSILON = (1e-12, 0.1)  # of a norm: float32 adds nothing below, and little else above
LAYER_TYPES = ("full_attention", "sliding_attention")
THETA = (1.0, 1e15)
FACTOR = (1.0, 1e6)
ROPE_KEYS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""What each type of rope is computed from, besides theta."""
ROPE_NEUTRAL: Mapping[str, object] = {"partial_rotary_factor": 1.0, "rope_traditional": False, "rope_interleaved": False}
"""Keys that other readers honour, with the value that says what is computed here."""


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
    """Reads the values of a config by their types; a complaint names the file, the key, its value and what is allowed.

    A key that is absent or null takes the default; where there is none, it must be there. `within`: the key of the object
    that the values stand in, for messages.
    """

    def __init__(self, config: Mapping[str, Any], file: str = "config.json", within: str = "") -> None:
        self._config, self._file, self._within = config, file, within

    def given(self, key: str) -> bool:
        """Whether the key has a value."""
        return self._config.get(key) is not None

    def size(self, key: str, default: int | None = None, most: int = LARGEST, least: int = 1) -> int:
        """An integer from `least` to `most`."""
        value = self._get(key, default)
        if type(value) is not int or not least <= value <= most:
            self._refuse(key, f"an integer from {least} to {most:,}")
        return value

    def number(self, key: str, default: float | None, least: float, most: float) -> float:
        """A number from `least` to `most`."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not least <= value <= most:
            self._refuse(key, f"a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false, which is the default."""
        value = self._get(key, False)
        if not isinstance(value, bool):
            self._refuse(key, "true or false")
        return value

    def choice(self, key: str, known: Sequence[str], default: str) -> str:
        """One of the known words."""
        value = self._get(key, default)
        if not isinstance(value, str) or value not in known:
            self._refuse(key, f"{' or '.join(known)}: nothing else is supported")
        return value

    def choices(self, key: str, known: Sequence[str], default: Sequence[str]) -> tuple[str, ...]:
        """As many of the known words as there are by default."""
        value = self._get(key, list(default))
        if not isinstance(value, list) or len(value) != len(default) or not all(item in known for item in value):
            self._refuse(key, f"{len(default)} times {' or '.join(known)}")
        return tuple(value)

    def token_ids(self, key: str, vocab: int) -> tuple[int, ...]:
        """A token id, a list of them, or none; each below `vocab`."""
        value = self._get(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(type(token) is int and 0 <= token < vocab for token in ids):
            self._refuse(key, f"token ids from 0 to {vocab - 1:,} (vocab_size is {vocab:,})")
        return tuple(ids)

    def rope(self) -> RopeConfig:
        """Rope of either spelling: `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling`."""
        self._check_neutral()
        found = [self._section(key)._rope(self) for key in ("rope_parameters", "rope_scaling") if self.given(key)]
        if len(set(found)) > 1:
            raise CheckpointError(
                f"{self._file}: rope_parameters and rope_scaling say different things; leave only the one that is right"
            )
        return found[0] if found else ConfigReader({}, self._file)._rope(self)

    def _rope(self, top: ConfigReader) -> RopeConfig:
        """Rope of this object; theta can stand in `top` instead."""
        kind = self.choice("rope_type", tuple(ROPE_KEYS), self.choice("type", tuple(ROPE_KEYS), "default"))
        if self.choice("type", tuple(ROPE_KEYS), kind) != kind:
            self._refuse("type", f"{kind}, as rope_type says")
        known = {"rope_type", "type", "rope_theta", *ROPE_KEYS[kind], *ROPE_NEUTRAL}
        if unknown := [key for key in self._config if self.given(key) and key not in known]:
            self._refuse(unknown[0], f"nothing: rope of type {kind} is computed without it, so it is not supported")
        self._check_neutral()
        theta = (self if self.given("rope_theta") else top).number("rope_theta", 10000.0, *THETA)
        if kind == "default":
            return RopeConfig(theta)
        factor = self.number("factor", None, *FACTOR)
        if kind == "linear":
            return RopeConfig(theta, kind, factor)
        low, high = (self.number(f"{end}_freq_factor", None, 1e-3, FACTOR[1]) for end in ("low", "high"))
        if low >= high:
            self._refuse("high_freq_factor", f"more than low_freq_factor, which is {low:g}")
        context = self.size("original_max_position_embeddings", most=MAX_CONTEXT)
        return RopeConfig(theta, kind, factor, low, high, context)

    def _check_neutral(self) -> None:
        for key, neutral in ROPE_NEUTRAL.items():
            value = self._get(key, neutral)
            if value != neutral or isinstance(value, bool) != isinstance(neutral, bool):
                self._refuse(key, f"{json.dumps(neutral)}: nothing else is supported")

    def _get(self, key: str, default: Any = None) -> Any:
        value = self._config.get(key)
        return default if value is None else value

    def _section(self, key: str) -> ConfigReader:
        value = self._config[key]
        if not isinstance(value, Mapping):
            self._refuse(key, "an object")
        return ConfigReader(value, self._file, f"{key}.")

    def _refuse(self, key: str, expected: str) -> Never:
        raise CheckpointError(f"{self._file}: {self._within}{key} is {_show(self._config.get(key))}; expected {expected}")


def _show(value: object) -> str:
    """A value as JSON writes it, cut short."""
    shown = json.dumps(value, default=repr)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
