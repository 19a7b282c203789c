"""Writes step/config_defaults.json: the defaults of the installed transformers' config classes.

    python scripts/freeze_defaults.py

Run it when nearfar is to follow a newer transformers, or has a new file in step/models. A test compares the
file with the installed transformers. Builds read the file, so that they need no transformers.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from nearfar.build.unread import NEUTRAL
from nearfar.step.defaults import DEFAULTS
from nearfar.step.models import architectures


def frozen() -> dict[str, dict[str, Any]]:
    """The keys of each config class with their defaults as JSON, by model_type, without the NEUTRAL keys."""
    from transformers import CONFIG_MAPPING

    return {name: _defaults(CONFIG_MAPPING[name]) for name in sorted(architectures())}


def _defaults(kind: type[Any]) -> dict[str, Any]:
    fields = [field for field in dataclasses.fields(kind) if field.init and field.name not in NEUTRAL]
    made = {f.name: f.default_factory() for f in fields if f.default_factory is not dataclasses.MISSING}
    made |= {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    found: dict[str, Any] = json.loads(json.dumps(dict(sorted(made.items()))))
    return found


def main() -> None:
    """Write the file."""
    text = json.dumps(frozen(), indent=1) + "\n"
    DEFAULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
