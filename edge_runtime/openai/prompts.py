"""Encodes a conversation as a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.edge_runtime.tools.messages import prepared
from nearfar.edge_runtime.tools.reading import reasoning_opened

END = 64
"""Characters of the end of a prompt that are kept, to see which tokens continue it."""


class ChatEncoder:
    """Encodes conversations as tokens up to the place where the answer begins, or continues
    (`continue_last`).

    `tools`: the tools that may be called. `variables`: for the chat template, in addition to those that it
    always gets.
    """

    def __init__(
        self,
        codec: TextCodec,
        tools: Seq[Mapping[str, Any]] = (),
        continue_last: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self._codec, self._tools, self._continue = codec, tools, continue_last
        self._variables = variables or {}
        self.reasoning_open = False
        """Whether the last encoded prompt ends in the mark that begins reasoning."""
        self.end = ""
        """The last characters of the last encoded prompt."""

    def __call__(self, messages: Seq[Mapping[str, Any]]) -> list[int]:
        """The tokens of a conversation."""
        codec = self._codec
        source = codec.template_source(bool(self._tools)) or ""
        given, variables = prepared(messages, self._tools, codec.answers, source)
        variables = {**self._variables, **variables}
        text = codec.render_chat(given, continue_last=self._continue, variables=variables)
        self.reasoning_open = reasoning_opened(codec.answers, text)
        self.end = text[-END:]
        return codec.encode_raw(text)
