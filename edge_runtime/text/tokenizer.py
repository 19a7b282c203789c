"""The one place that makes a tokenizer of the bytes of a tokenizer.json."""

from __future__ import annotations

from tokenizers import Tokenizer


def tokenizer_of(data: str | bytes) -> Tokenizer:
    """The tokenizer of a tokenizer.json, which gives all tokens of a text and no others.

    A tokenizer.json may say `truncation` and `padding`: settings of the calls of whoever saved it.
    transformers switches both off for every call that does not ask for them; the library alone keeps them,
    and so cuts prompts or fills them up (https://github.com/ai-dynamo/dynamo/issues/11792).
    """
    made = Tokenizer.from_str(data) if isinstance(data, str) else Tokenizer.from_buffer(data)
    made.no_truncation()
    made.no_padding()
    return made
