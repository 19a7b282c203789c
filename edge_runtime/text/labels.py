"""The tokens of a label that continues a prompt."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from nearfar.edge_runtime.text.codec import TextCodec


def label_tokens(codec: TextCodec, before: str, labels: Seq[str]) -> list[list[int]]:
    """The tokens of labels as the continuation of a text of which `before` is the end.

    They are those that the tokenizer adds to the text. If it would change the last tokens of the text, which
    an answer cannot, they are those of the label alone.
    """
    start, made = codec.encode_raw(before), []
    for label in labels:
        whole = codec.encode_raw(before + label)
        kept = len(whole) > len(start) and whole[: len(start)] == start
        made.append(whole[len(start) :] if kept else codec.encode_raw(label))
    return made
