"""The one place that makes a tokenizer from a tokenizer.json."""

from __future__ import annotations

from tokenizers import Tokenizer


def tokenizer_of(data: str | bytes) -> Tokenizer:
    """The tokenizer of a tokenizer.json, without truncation and padding: it returns all tokens of a text and
    no others.

    A tokenizer.json may set `truncation` and `padding`, as leftovers of its author's calls. transformers
    switches both off for every call that does not request them; the library alone keeps them, and so cuts or
    pads prompts (https://github.com/ai-dynamo/dynamo/issues/11792).
    """
    made = Tokenizer.from_str(data) if isinstance(data, str) else Tokenizer.from_buffer(data)
    made.no_truncation()
    made.no_padding()
    return made
