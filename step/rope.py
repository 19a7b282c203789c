"""Rotary position embeddings (Su et al., 2021) as tables of frequencies, with every known way of stretching
them.

The formulas are those of transformers' `modeling_rope_utils`, computed in float32 as there, so that angles
agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nearfar.step.config import MAX_CONTEXT, ConfigReader

THETA = (1.0, 1e15)
FACTOR = (1e-6, 1e6)
BETA = (1e-6, 1e6)

Frequencies = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ShortRope:
    """LongRoPE's short set of frequencies, for engines whose sequences have at most `context` positions."""

    inv_freq: tuple[float, ...]
    context: int


@dataclass(frozen=True)
class Rope:
    """A table: pair i of a head turns by position · inv_freq[i]; cosine and sine are multiplied by `scale`.

    `inv_freq` has head_dim/2 float32 values; a pair with frequency 0 is neither rotated nor scaled. An engine
    whose context fits `short` uses its frequencies instead.
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0
    short: ShortRope | None = None


@dataclass(frozen=True)
class Rotation:
    """A table with `rotary`, the number of a head's values that turn."""

    rope: Rope
    rotary: int


Keys = Mapping[str, tuple[str, ...]]
LONGROPE = ("factor", "attention_factor", "short_factor", "long_factor", "original_max_position_embeddings")
KEYS: Keys = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
        "original_max_position_embeddings",
    ),
    "longrope": LONGROPE,
    "su": LONGROPE,
    "dynamic": ("factor",),
    "proportional": ("factor",),
}  # fmt: skip
"""Keys of each rope type, besides theta and partial_rotary_factor. "su" is longrope in early Phi-3 models."""
ALPHA = ("alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Further keys of Hunyuan's "dynamic", of which only alpha has an effect."""
BY_AXIS = ("mrope_section", "mrope_interleaved")
"""Keys of models that see: pairs of a head turn by an image's row, its column or the time. The three
positions of a text's token are equal, so these keys change nothing in texts.
"""
MEANS: Mapping[str, str] = {"mrope": "default"}
"""Names of types that mean another type in texts."""

COMMON = ("default", "linear", "llama3", "yarn", "longrope", "proportional", "dynamic")
"""The types that mean the same in every architecture."""


def frequencies(theta: float, rotary: int) -> Frequencies:
    """float32 [rotary/2]: theta^(−2i/rotary)."""
    exponent = np.arange(0, rotary, 2, dtype=np.float32) / np.float32(rotary)
    return np.asarray(1.0 / np.power(np.float32(theta), exponent), np.float32)


def padded(freq: Frequencies, head_dim: int, scale: float = 1.0) -> Rope:
    """A table for whole heads: pairs that do not rotate have frequency 0."""
    return Rope(_whole(freq, head_dim), scale)


def _whole(freq: Frequencies, head_dim: int) -> tuple[float, ...]:
    return (*(float(value) for value in freq), *[0.0] * (head_dim // 2 - len(freq)))


def read_rope(
    read: ConfigReader, head_dim: int, context: int, *, layer_type: str | None = None,
    kinds: Sequence[str] = COMMON, theta: float = 10000.0, partial: float = 1.0, original: int | None = None,
    beside: Sequence[str] = (), parts: bool = False, alpha: bool = False,
) -> Rotation:  # fmt: skip
    """Read the table of a config: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`.

    `layer_type`: the type of layer whose table is read, if rope_parameters has several. `context`: the
    artifact's positions. `kinds`: the types that the architecture supports. `theta`, `partial`, `original`
    (positions before stretching): defaults. `beside`: keys with another purpose. `parts`: whether
    transformers' class can rotate a part of each head; other classes ignore partial_rotary_factor, or fail.
    `alpha`: whether it knows a constant that stretches type "dynamic".
    """

    def table(section: ConfigReader) -> Rotation:
        return _read(section, read, head_dim, context, kinds, theta, partial, original, beside, parts, alpha)

    found = [table(section) for section in rope_sections(read, layer_type)]
    if any(other != found[0] for other in found):
        raise read.error(
            "rope_parameters and rope_scaling say different things; leave only the one that is right"
        )
    return found[0] if found else table(read.empty())


def rope_sections(read: ConfigReader, layer_type: str | None = None) -> list[ConfigReader]:
    """The sections of a config about rotations: none, one, or two that must agree."""
    return [
        _inner(read.section(key), layer_type)
        for key in ("rope_parameters", "rope_scaling")
        if read.given(key)
    ]


def _inner(section: ConfigReader, layer_type: str | None) -> ConfigReader:
    """The section of a type of layer, if the parameters are given by type; otherwise the section itself."""
    if layer_type is None or not section.given(layer_type):
        return section
    return section.section(layer_type)


def _read(
    read: ConfigReader, top: ConfigReader, head_dim: int, context: int, kinds: Sequence[str], theta: float,
    partial: float, original: int | None, beside: Sequence[str], parts: bool, alpha: bool,
) -> Rotation:  # fmt: skip
    kind = _kind(read, kinds)
    stretched = alpha and kind == "dynamic" and read.given("alpha")
    _check_neutral(read)
    _check_neutral(top)
    known = {
        "rope_type", "type", "rope_theta", "partial_rotary_factor", *KEYS[kind], *NEUTRAL, *BY_AXIS, *beside,
        *(ALPHA if stretched else ()),
    }  # fmt: skip
    if unknown := [key for key in read.names() if read.given(key) and key not in known]:
        read.refuse(
            unknown[0], f"nothing: rope of type {kind} is computed without it, so it is not supported"
        )
    base = _first(read, top, "rope_theta").number("rope_theta", theta, *THETA)
    told = _first(read, top, "partial_rotary_factor")
    part = told.number("partial_rotary_factor", partial, 1e-3, 1.0)
    rotary = int(head_dim * part)
    if kind == "proportional":
        return Rotation(_proportional(read, base, head_dim, part), head_dim)
    if part != 1.0 and not parts:
        told.refuse("partial_rotary_factor", "1: transformers turns whole heads in models of this type")
    if rotary < 2 or rotary % 2:
        told.refuse("partial_rotary_factor", f"a part of head_dim {head_dim} that is even, not {rotary}")
    if stretched:
        base = _alpha(read, base, rotary)
    freq = frequencies(base, rotary)
    if kind in ("default", "dynamic"):  # without alpha, dynamic stretches only beyond max_position_embeddings
        return Rotation(padded(freq, head_dim), rotary)
    if kind == "linear":
        factor = np.float32(read.number("factor", None, *FACTOR))
        return Rotation(padded(np.asarray(freq / factor, np.float32), head_dim), rotary)
    stated = top.size("max_position_embeddings", context, MAX_CONTEXT)
    original = original_context(read, top, original or stated)
    if kind == "llama3":
        return Rotation(padded(_llama3(read, freq, original), head_dim), rotary)
    if kind == "yarn":
        scaled, scale = _yarn(read, base, rotary, original, stated)
        return Rotation(padded(scaled, head_dim, scale), rotary)
    return Rotation(_longrope(read, base, (head_dim, rotary), (original, stated, context)), rotary)


def _kind(read: ConfigReader, kinds: Sequence[str]) -> str:
    """The type of a rotation, by `rope_type` or the older `type`, which must not differ."""
    names = (*kinds, *MEANS)
    told = {key: read.choice(key, names, "default") for key in ("rope_type", "type") if read.given(key)}
    found = {MEANS.get(name, name) for name in told.values()}
    if len(found) > 1:
        read.refuse("type", f"{told['rope_type']}, as rope_type says")
    return found.pop() if found else "default"


NEUTRAL: Mapping[str, object] = {"rope_traditional": False, "rope_interleaved": False}
"""Keys that other readers use, with the value that matches our computation."""


def _check_neutral(read: ConfigReader) -> None:
    for key, neutral in NEUTRAL.items():
        if read.given(key) and read.flag(key) is not neutral:
            read.refuse(key, "false: nothing else is supported")


def original_context(read: ConfigReader, top: ConfigReader, default: int) -> int:
    """The number of positions before stretching; a key outside the rope section takes precedence."""
    key = "original_max_position_embeddings"
    return _first(top, read, key).size(key, default, MAX_CONTEXT)


def _alpha(read: ConfigReader, theta: float, rotary: int) -> float:
    """Hunyuan's "dynamic": a constant stretches theta for every length; no other key has an effect."""
    return float(theta * read.number("alpha", None, 1.0, FACTOR[1]) ** (rotary / (rotary - 2)))


def _first(one: ConfigReader, other: ConfigReader, key: str) -> ConfigReader:
    return one if one.given(key) else other


def _proportional(read: ConfigReader, theta: float, head_dim: int, part: float) -> Rope:
    """Gemma 4: the frequencies of a whole head, of which only the first part rotates."""
    turning = int(part * head_dim // 2)
    exponent = np.arange(0, 2 * turning, 2, dtype=np.float32) / np.float32(head_dim)
    freq = 1.0 / np.power(np.float32(theta), exponent) / np.float32(read.number("factor", 1.0, *FACTOR))
    return padded(np.asarray(freq, np.float32), head_dim)


def _llama3(read: ConfigReader, freq: Frequencies, original: int) -> Frequencies:
    """Llama 3.1: `factor` slows long wavelengths, short ones are kept, and those between are blended."""
    factor = read.number("factor", None, *FACTOR)
    slow, fast = (read.number(f"{end}_freq_factor", None, 1e-3, FACTOR[1]) for end in ("low", "high"))
    if slow >= fast:
        read.refuse("high_freq_factor", f"more than low_freq_factor, which is {slow:g}")
    wavelength = 2 * math.pi / freq
    smooth = (original / wavelength - slow) / (fast - slow)
    blended = (1 - smooth) * freq / factor + smooth * freq
    scaled = np.where(
        wavelength > original / slow, freq / factor, np.where(wavelength < original / fast, freq, blended)
    )
    return np.asarray(scaled, np.float32)


def _yarn(
    read: ConfigReader, theta: float, rotary: int, original: int, stated: int
) -> tuple[Frequencies, float]:
    """Peng et al., "YaRN" (2023): slow pairs are interpolated, fast ones kept, with a ramp between them."""
    factor = read.number("factor", stated / original, *FACTOR)
    fast, slow = read.number("beta_fast", 32.0, *BETA), read.number("beta_slow", 1.0, *BETA)

    def sharpened(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if read.given("attention_factor"):
        scale = read.number("attention_factor", None, *FACTOR)
    else:
        parts = [read.number(key, 0.0, 0.0, 1e3) for key in ("mscale", "mscale_all_dim")]
        scale = sharpened(parts[0]) / sharpened(parts[1]) if all(parts) else sharpened(1.0)

    def dimension(rotations: float) -> float:
        return (rotary * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = dimension(fast), dimension(slow)
    if read.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary - 1)
    span = high - low if high != low else 0.001
    ramp = np.clip((np.arange(rotary // 2, dtype=np.float32) - np.float32(low)) / np.float32(span), 0, 1)
    exponent = np.arange(0, rotary, 2, dtype=np.float32) / np.float32(rotary)
    wide = np.power(np.float32(theta), exponent)
    keep = (1 - ramp).astype(np.float32)
    freq = (1.0 / (np.float32(factor) * wide)) * (1 - keep) + (1.0 / wide) * keep
    return np.asarray(freq, np.float32), scale


def _longrope(
    read: ConfigReader, theta: float, sizes: tuple[int, int], lengths: tuple[int, int, int]
) -> Rope:
    """Ding et al., "LongRoPE" (2024): a factor for each pair, in one set for the original context and one
    beyond it.

    `sizes`: head_dim and how many of its values turn. `lengths`: the original positions, those that the
    config states, and those that the artifact will have. An artifact for at most the original positions needs
    only the short set. A longer one has both, and an engine takes the set that fits its context.
    """
    (head_dim, rotary), (original, stated, context) = sizes, lengths
    factor = read.number("factor", stated / original, *FACTOR)
    scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    scale = read.number("attention_factor", scale, *FACTOR)
    wide = np.power(np.float32(theta), np.arange(0, rotary, 2, dtype=np.float32) / np.float32(rotary))
    short, long = (
        _whole(np.asarray(1.0 / (np.array(factors, np.float32) * wide), np.float32), head_dim)
        for factors in (read.numbers(f"{end}_factor", rotary // 2, *FACTOR) for end in ("short", "long"))
    )
    if context <= original or short == long:
        return Rope(short, scale)
    return Rope(long, scale, ShortRope(short, original))
