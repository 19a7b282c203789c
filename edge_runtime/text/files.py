"""The files of a model's text side, and the choice of a chat template: one for plain chats, another for
tools.

As in transformers, the second is called `tool_use`: in the list of tokenizer_config.json, or as a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nearfar.errors import ArtifactError

TEMPLATE = "chat_template.jinja"
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
TEMPLATE_FILES = (TEMPLATE, TOOL_TEMPLATE)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", *TEMPLATE_FILES)
"""All text files that are read from a checkpoint or an artifact."""
NO_TEMPLATE = "this model has no chat template; send a raw prompt instead (completions, --raw)"
_NAMES = {TEMPLATE: "default", TOOL_TEMPLATE: "tool_use"}


@dataclass(frozen=True)
class ChatTemplates:
    """The texts of a model's chat templates.

    `plain`: None if the model cannot chat. `tools`: for conversations with tools; None if `plain` serves
    these, too.
    """

    plain: str | None = None
    tools: str | None = None

    def chosen(self, tools: bool) -> str | None:
        """The template of a conversation with tools, or without."""
        return self.tools if tools and self.tools is not None else self.plain

    @property
    def all(self) -> tuple[str, ...]:
        """All templates of the model, the template for tools first."""
        return tuple(dict.fromkeys(text for text in (self.tools, self.plain) if text))

    @property
    def files(self) -> dict[str, str]:
        """All templates of the model, by the names of their files."""
        found = {TEMPLATE: self.plain, TOOL_TEMPLATE: self.tools}
        return {name: text for name, text in found.items() if text is not None}


def find_templates(config: Mapping[str, Any], files: Mapping[str, str]) -> ChatTemplates:
    """The templates of a tokenizer_config.json and of TEMPLATE_FILES next to it.

    If there is a chat_template.jinja, the config's templates are ignored. ArtifactError if the config's are
    not templates, or if it has several and no default one.
    """
    named = {} if TEMPLATE in files else _named(config.get("chat_template"))
    named |= {_NAMES[name]: text for name, text in files.items()}
    if not named:
        return ChatTemplates()
    if "default" not in named and len(named) > 1:
        raise ArtifactError(
            f"of the chat templates {', '.join(sorted(named))} none is called default: give the one for "
            "plain chats this name"
        )
    plain = named.get("default", next(iter(named.values())))
    tools = named.get("tool_use")
    return ChatTemplates(plain or None, None if tools == plain else tools or None)


def _named(value: object) -> dict[str, str]:
    """The templates of a tokenizer config by name; the config has a text, or a list of named ones."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    items = value if isinstance(value, list) else [value]
    named = {
        item["name"]: item["template"]
        for item in items
        if isinstance(item, dict)
        and isinstance(item.get("name"), str)
        and isinstance(item.get("template"), str)
    }
    if not isinstance(value, list) or len(named) < len(items):
        raise ArtifactError(
            f"chat_template is {str(value)[:80]}; expected a template, or a list of objects with name and "
            "template"
        )
    return named
