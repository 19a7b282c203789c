"""Gemma 3 that sees: its text model."""

from __future__ import annotations

from nearfar.step.config import ConfigReader
from nearfar.step.model import Model, within
from nearfar.step.models import gemma3_text


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The text model of a config.json."""
    return within("gemma3", gemma3_text.model(read.text("gemma3_text"), context))
