"""Refuses to build for browsers what the web engine would read as another text than Python does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from nearfar.build.browser import templates, tokenizers
from nearfar.build.weights.container import Checkpoint
from nearfar.errors import BuildError

_NAMED = ("default", "tool_use")
"""Chat templates that are taken of a list."""


def check_text(target: str, checkpoint: Checkpoint) -> None:
    """BuildError where a browser would make other tokens of a text, or another text of a conversation."""
    for file, template in _templates(checkpoint):
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


def _templates(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    if template := checkpoint.chat_template:
        yield "the chat template", template
    listed = checkpoint.tokenizer_config.get("chat_template")
    for entry in listed if isinstance(listed, list) else ():
        if (
            isinstance(entry, Mapping)
            and entry.get("name") in _NAMED
            and isinstance(entry.get("template"), str)
        ):
            yield f"the chat template {entry['name']!r}", entry["template"]


def _listed(found: list[Any]) -> str:
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
