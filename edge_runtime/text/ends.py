"""Finds the tokens that end an answer: those in configs, and those only in the tokenizer or its template."""

from __future__ import annotations

from collections.abc import Sequence

from nearfar.edge_runtime.text.codec import TextCodec


def end_tokens(codec: TextCodec, named: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """`named` (from config.json and generation_config.json), then `eos_token` of tokenizer_config.json, and
    the token that the chat template writes after an answer.

    Chat models that were tuned from base models often keep the base's configs, and would continue after the
    end of their turn (https://github.com/ml-explore/mlx-lm/issues/1414).
    """
    ids = codec.tokenizer.get_vocab(with_added_tokens=True)
    added = {entry.content for entry in codec.tokenizer.get_added_tokens_decoder().values()}
    behind = codec.behind_an_answer().lstrip()
    marks = [content for content in added if content.strip() and behind.startswith(content)]
    own = (codec.special.get("eos_token"), max(marks, key=len, default=None))
    more = (ids[text] for text in own if text in ids and ids[text] < vocab_size)
    return tuple(dict.fromkeys((*named, *more)))
