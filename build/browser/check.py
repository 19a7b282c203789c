"""Refuses checkpoints whose tokenizer or chat template the web engine would read differently from Python."""

from __future__ import annotations

import json
from typing import Any

from nearfar.build.browser import templates, tokenizers
from nearfar.build.weights.container import Checkpoint
from nearfar.errors import BuildError


def check_text(target: str, checkpoint: Checkpoint) -> None:
    """Raise BuildError where the web engine would tokenize a text, or render a conversation, differently."""
    for file, template in checkpoint.chat_templates.files.items():
        if found := templates.unknown_in(template):
            raise BuildError(
                f"target {target}: {file} has {_listed(found)}, which the web engine does not render as "
                "transformers does. Write that in another way, or build for other targets (--target cpu)"
            )
    if found := tokenizers.unknown_in(json.loads(checkpoint.tokenizer_json)):
        raise BuildError(
            f"target {target}: tokenizer.json has {_listed(found)}, which the web engine does not follow. "
            "Build for other targets (--target cpu)"
        )


def _listed(found: list[Any]) -> str:
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
