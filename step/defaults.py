"""The defaults of transformers' config classes, frozen in config_defaults.json (scripts/freeze_defaults.py).

They are copied to a file, since importing transformers takes 1 s of CPU time, and 3 s where PyTorch is
installed, and builds must work without it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEFAULTS = Path(__file__).with_name("config_defaults.json")
"""The frozen defaults, by model_type."""


def defaults_of(model_type: str) -> Mapping[str, Any]:
    """The keys of a model type's config class with their defaults; empty for a type that has none frozen."""
    return _defaults().get(model_type, {})


def given_defaults(model_type: str) -> dict[str, Any]:
    """The defaults of a model type's config class, except those that are null: what null means is up to the
    model file.
    """
    return {key: value for key, value in defaults_of(model_type).items() if value is not None}


@functools.cache
def _defaults() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(DEFAULTS.read_text(encoding="utf-8"))
    return found
