"""Makes the model parts of tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Pair = tuple[str, ...]


def bpe_merges(ids: Mapping[str, int], texts: Sequence[str], best: Mapping[int, float]) -> list[Pair]:
    """The merges of a BPE vocabulary: pairs of tokens whose texts join to a token, ordered by `best` of that
    token (lowest first), then by its id. Only tokens in `best` result.
    """
    order = sorted(best, key=lambda token: (best[token], token))
    merges: list[Pair] = []
    for token in order:
        text = texts[token]
        if ids[text] != token:
            continue
        pairs = ((text[:at], text[at:]) for at in range(1, len(text)))
        known = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
        merges += sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


def byte_level_model(ids: Mapping[str, int], merges: Sequence[Pair], ignore_merges: bool) -> dict[str, Any]:
    """Make a byte-level BPE model. `ignore_merges`: a word that is a token is not merged."""
    return {"model": _bpe(ids, merges, ignore_merges=ignore_merges)}


def byte_fallback_model(
    ids: Mapping[str, int], merges: Sequence[Pair], unknown: str | None, prefix: bool
) -> dict[str, Any]:
    """Make a BPE model with byte fallback. Spaces become ▁, with one before the text if `prefix`; unknown
    characters become tokens of bytes.
    """
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    front = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
    back = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
        {"type": "Fuse"}, *back,
    ]  # fmt: skip
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*front, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def _bpe(ids: Mapping[str, int], merges: Sequence[Pair], **settings: Any) -> dict[str, Any]:
    defaults = {
        "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
    }  # fmt: skip
    return {
        "type": "BPE",
        **defaults,
        **settings,
        "vocab": dict(ids),
        "merges": [list(pair) for pair in merges],
    }
