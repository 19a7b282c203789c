"""Ministral 3 (2025): a Mistral with yarn, whose queries grow with the logarithm of their position.

The growth is Llama 4's; it keeps attention sharp in long contexts.
"""

from __future__ import annotations

from dataclasses import replace

from nearfar.step.builder import StepBuilder
from nearfar.step.config import ConfigReader
from nearfar.step.decoder import Attention, Decoder, Mlp, order_of, read_activation, read_decoder
from nearfar.step.model import Model
from nearfar.step.models.llama import pre_norm
from nearfar.step.models.mistral import mistral_windows
from nearfar.step.rope import original_context, read_rope, rope_sections

DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}
BETA = "llama_4_scaling_beta"


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    read = read.filled(DEFAULTS)
    c = read_decoder(read, context)
    growth = _growth(read, c)
    rotation = read_rope(read, c.head_dim, c.context, beside=(BETA, "max_position_embeddings"))
    attend = Attention(
        c.heads, c.kv_heads, c.head_dim, "rope", order_of(rotation, c.head_dim), q_scale=growth
    )
    s = StepBuilder()
    s.rope("rope", rotation.rope)
    layers = [replace(attend, window=window) for window in mistral_windows(read, c.layers)]
    return pre_norm(s, c, "ministral3", layers, Mlp(c.inner, read_activation(read)))


def _growth(read: ConfigReader, c: Decoder) -> tuple[float, float] | None:
    """The growth of queries as (beta, original context); None if config.json has no beta."""
    sections = rope_sections(read)
    if not sections:
        read.refuse("rope_parameters", "an object, which says how positions are stretched")
    if not sections[0].given(BETA):
        return None
    original = original_context(sections[0], read, read.size("max_position_embeddings"))
    return sections[0].number(BETA, None, 0.0, 1e3), float(original)
