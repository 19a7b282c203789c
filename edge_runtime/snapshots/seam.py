"""Finds the tokens with which every continuation of a prompt begins."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from nearfar.edge_runtime.cache import common_length
from nearfar.errors import RequestError

if TYPE_CHECKING:
    from nearfar.edge_runtime.text.codec import TextCodec

PROBES = ("A", "z", "7", " and", "\n\n- x", "“é", "(", "…")
"""Possible continuations.

A tokenizer may join the last characters of a prefix with the first that follow, differently for a letter, a
digit, space, a new line or a sign. Tokens that none of these changes are stable.
"""


def chat_prefix(codec: TextCodec, messages: Seq[Mapping[str, Any]]) -> list[int]:
    """The tokens with which the conversation begins, whatever message follows.

    The conversation is rendered with a user's turn after it, whose content varies; the result is the common
    beginning. A user's turn at the end may be asked as it is, or continue (a long text, then a question about
    it).
    """
    *before, last = messages
    if last["role"] != "user":
        return _common(
            [codec.encode_chat([*messages, {"role": "user", "content": probe}]) for probe in PROBES]
        )
    longer = [{**last, "content": last["content"] + probe} for probe in PROBES]
    return _common([codec.encode_chat([*before, message]) for message in (last, *longer)])


def text_prefix(codec: TextCodec, text: str) -> list[int]:
    """The tokens with which a raw prompt begins, whatever follows the text, or if nothing does."""
    return _common([codec.encode(text), *(codec.encode(text + probe) for probe in PROBES)])


def whole_pages(tokens: Seq[int], page_size: int) -> list[int]:
    """The tokens that fill whole pages, which the cache can find again; RequestError if they fill none."""
    if len(tokens) < page_size:
        raise RequestError(
            f"the prompt begins with {len(tokens)} tokens that stay whatever follows; a snapshot needs at "
            f"least a page of {page_size}: there is nothing worth saving",
            "prompt",
        )
    return list(tokens[: len(tokens) // page_size * page_size])


def _common(many: Seq[Seq[int]]) -> list[int]:
    """The longest common beginning of token sequences."""
    first = many[0]
    return list(first[: min(common_length(first, other) for other in many)])
