"""Gemma 4 that sees and hears: its text model."""

from __future__ import annotations

from nearfar.step.config import ConfigReader
from nearfar.step.model import Model, within
from nearfar.step.models import gemma4_text


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The text model of a config.json."""
    return within("gemma4", gemma4_text.model(read.text("gemma4_text"), context))
