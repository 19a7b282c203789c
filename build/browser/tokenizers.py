"""Finds out at build time whether the web engine follows a tokenizer.json.

The accepted steps are those that tests/unit/test_tokenizer_parity.py has compared with the tokenizers
library.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

Step = Mapping[str, Any]
Told = Iterator[str]


def unknown_in(tokenizer: Step) -> list[str]:
    """Names the steps of a tokenizer.json that the web engine does not follow, each once."""
    found = [
        *_steps("normalizer", tokenizer.get("normalizer"), "normalizers", _NORMALIZERS),
        *_steps("pre_tokenizer", tokenizer.get("pre_tokenizer"), "pretokenizers", _PRE_TOKENIZERS),
        *_metaspace_first(tokenizer),
        *_model(tokenizer.get("model") or {}),
        *_steps("post_processor", tokenizer.get("post_processor"), "processors", _POST_PROCESSORS),
        *_decoder(tokenizer.get("decoder")),
    ]
    return list(dict.fromkeys(found))


def _steps(kind: str, step: Step | None, inner: str, known: Collection[str]) -> Told:
    for one in _flat(step, inner):
        if one.get("type") not in known:
            yield f"the {kind} {one.get('type')}"


_NORMALIZERS: Final = {"NFC", "NFD", "NFKC", "NFKD", "Strip", "StripAccents"} | {
    *("Lowercase", "Prepend", "Replace")
}
_PRE_TOKENIZERS: Final = {"ByteLevel", "Split", "Metaspace", "Digits", "Punctuation"} | {
    *("Whitespace", "WhitespaceSplit", "BertPreTokenizer")
}
_POST_PROCESSORS: Final = {"ByteLevel", "TemplateProcessing", "BertProcessing", "RobertaProcessing"}


def _metaspace_first(tokenizer: Step) -> Told:
    """Name a Metaspace that marks only the first word: Rust's library looks at a piece's place in the
    original text, the web engine at whether the piece is the first.
    """
    steps = list(_flat(tokenizer.get("pre_tokenizer"), "pretokenizers"))
    first = [step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first" for step in steps]
    if any(first[1:]):
        yield "a Metaspace for the first word behind other pre-tokenizers"
    for step in _flat(tokenizer.get("normalizer"), "normalizers") if any(first) else ():
        removes = step.get("type") in ("Strip", "StripAccents")
        if removes or (step.get("type") == "Replace" and step.get("content") == ""):
            yield f"a Metaspace for the first word behind the normalizer {step['type']}"


def _flat(step: Step | None, inner: str) -> Iterator[Step]:
    """Yield the steps of a Sequence, or the single step itself."""
    if step is not None and step.get("type") == "Sequence":
        for one in step.get(inner) or ():
            yield from _flat(one, inner)
    elif step is not None:
        yield step


def _model(model: Step) -> Told:
    kind = model.get("type", "BPE" if "merges" in model else "none")
    if kind not in ("BPE", "Unigram"):
        yield f"a model of type {kind}"
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(name):
            yield f"{name} {model[name]!r}"


def _decoder(decoder: Step | None) -> Told:
    """Name the decoder's steps that web/src/worker/text/token-bytes.ts does not do."""
    steps = (
        [decoder] if decoder is None or decoder.get("type") != "Sequence" else decoder.get("decoders") or []
    )
    fused = False
    for step in steps:
        kind = None if step is None else step.get("type")
        known = kind in ("ByteFallback", "Fuse") or (kind == "ByteLevel" and len(steps) == 1)
        known |= kind == "Metaspace" and not fused
        known |= (
            kind == "Replace"
            and step is not None
            and isinstance(_text_of(step), str)
            and bool(_text_of(step))
        )
        known |= kind == "Strip" and step is not None and fused and step.get("stop") == 0
        if not known:
            yield (
                "no decoder"
                if kind is None
                else f"the decoder {kind}{' in such a sequence' if len(steps) > 1 else ''}"
            )
        fused |= kind == "Fuse"


def _text_of(step: Step) -> Any:
    pattern = step.get("pattern")
    return pattern.get("String") if isinstance(pattern, Mapping) else None
