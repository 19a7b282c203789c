"""Converts a GGUF file's metadata to tokenizer.json: byte-level BPE ("gpt2"), SentencePiece's BPE ("llama"),
and the latter with merges of its own ("gemma4").

The metadata have tokens, their kinds, scores or merges, and under `tokenizer.ggml.pre` llama.cpp's name for
how a text is split into words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nearfar.build.weights.gguf.pieces import bpe_merges, byte_fallback_model, byte_level_model
from nearfar.build.weights.gguf.splits import SPLITS, TextSplit
from nearfar.edge_runtime.text.files import TEMPLATE, TOOL_TEMPLATE, ChatTemplates, find_templates
from nearfar.errors import CheckpointError

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # type 6 is a byte
SPECIAL_IDS = {
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}  # fmt: skip
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
ENDINGS = frozenset(
    (
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<turn|>",
        "<|end_of_text|>",
        "<|endoftext|>",
    )
)
"""Control tokens that end an answer, also where a file names only another end token."""
READ = frozenset(
    (
        "model", "pre", "tokens", "scores", "token_type", "merges", "add_bos_token", "add_eos_token",
        "add_space_prefix", "token_type_count",
        # Ids of tokens that only a template puts into a text:
        "separator_token_id", "seperator_token_id", "cls_token_id", "mask_token_id", "prefix_token_id",
        "suffix_token_id", "middle_token_id", "fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id",
        "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id", *SPECIAL_IDS.values(), *ENDS,
    )
)  # fmt: skip
SPACED = ("llama", "gemma4")
"""The models whose tokens have ▁ for a space."""
KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>", "<|system|>", "<|end|>", "<|user|>")
NEUTRAL: Mapping[str, object] = {"remove_extra_whitespaces": False, "add_sep_token": False}


@dataclass(frozen=True)
class GgufTokenizer:
    """tokenizer.json, tokenizer_config.json, the chat templates, and the tokens that end an answer."""

    json: bytes
    config: dict[str, Any]
    templates: ChatTemplates
    ends: tuple[int, ...]


@dataclass(frozen=True)
class Vocabulary:
    """The tokens and their kinds, with access to the other metadata."""

    file: Path
    metadata: Mapping[str, Any]
    tokens: list[str]
    kinds: list[int]
    architecture: str

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of a key below `tokenizer.ggml.`; CheckpointError for another type."""
        value = self.metadata.get(PREFIX + key)
        if value is None:
            return default
        if type(value) is not kind:
            raise self.error(f"{PREFIX}{key} is {str(value)[:80]!r}; expected {kind.__name__}")
        return value

    def token(self, key: str) -> int | None:
        """A checked token id; None where the file has none."""
        found = self.get(key, int)
        if found is None or found == 0xFFFFFFFF:  # 0xFFFFFFFF is a stored -1
            return None
        if not 0 <= found < len(self.tokens):
            raise self.error(f"{PREFIX}{key} is {found:,}, there are {len(self.tokens):,} tokens")
        return int(found)

    def of_kind(self, *kinds: int) -> list[int]:
        """The ids of tokens of these kinds."""
        return [token for token, kind in enumerate(self.kinds) if kind in kinds]

    def error(self, message: str) -> CheckpointError:
        """An error that names the file."""
        return CheckpointError(f"{self.file}: {message}")


def read_tokenizer(file: Path, metadata: Mapping[str, Any], vocab_size: int) -> GgufTokenizer:
    """Convert the tokenizer of a file. Raises CheckpointError for an unsupported one."""
    words = _vocabulary(file, metadata, vocab_size)
    model = words.get("model", str, "")
    if model == "gpt2":
        made, add_bos = _byte_level(words)
    elif model in SPACED:
        made, add_bos = _sentencepiece(words, model == "gemma4"), True
    else:
        raise words.error(f"{PREFIX}model is {model!r}; those read are gpt2, {', '.join(SPACED)}")
    made["added_tokens"] = _added(words)
    made["post_processor"] = _around(words, add_bos)
    special = {name: words.token(key) for name, key in SPECIAL_IDS.items()}
    config = {name: words.tokens[token] for name, token in special.items() if token is not None}
    text = json.dumps({"version": "1.0", "truncation": None, "padding": None, **made}, ensure_ascii=False)
    return GgufTokenizer(text.encode("utf-8"), config, _templates(words), _ends(words))


def _vocabulary(file: Path, metadata: Mapping[str, Any], vocab_size: int) -> Vocabulary:
    """Read and check the tokens and their kinds."""
    architecture = str(metadata.get("general.architecture"))
    tokens, kinds = metadata.get(f"{PREFIX}tokens"), metadata.get(f"{PREFIX}token_type")
    words = Vocabulary(file, metadata, [], [], architecture)
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise words.error(f"{PREFIX}tokens is missing, or no list of texts: the file has no tokenizer")
    if len(tokens) > vocab_size:
        raise words.error(f"there are {len(tokens):,} tokens, but rows for {vocab_size:,} in the embedding")
    if kinds is not None and not (isinstance(kinds, np.ndarray) and kinds.dtype.kind in "iu"):
        raise words.error(f"{PREFIX}token_type is not a list of integers")
    found = [NORMAL] * len(tokens) if kinds is None else [int(kind) for kind in kinds]
    if len(found) != len(tokens):
        raise words.error(f"{PREFIX}token_type has {len(found):,} entries for {len(tokens):,} tokens")
    for key, value in metadata.items():
        name = key.removeprefix(PREFIX)
        if name == key or name in READ:
            continue
        if name not in NEUTRAL or type(value) is not bool or value is not NEUTRAL[name]:
            raise words.error(f"{key} is {str(value)[:80]!r}, which is not supported")
    return Vocabulary(file, metadata, tokens, found, architecture)


def _byte_level(words: Vocabulary) -> tuple[dict[str, Any], bool]:
    """Make the parts of tokenizer.json for byte-level BPE; also gives whether a text begins with BOS by
    default.
    """
    pre = words.metadata.get(f"{PREFIX}pre")
    split = SPLITS.get(pre) if isinstance(pre, str) else None
    if split is None:
        raise words.error(
            f"{PREFIX}pre is {pre!r}; those read are {', '.join(SPLITS)}: another way to split words would "
            "give other tokens than the model was trained on. Build from the safetensors checkpoint, or "
            "convert it with a recent llama.cpp"
        )
    ids = {
        token: index
        for index, (token, kind) in reversed(list(enumerate(zip(words.tokens, words.kinds, strict=True))))
        if kind != UNUSED
    }
    pairs = _pairs(words, ids)
    return byte_level_model(ids, pairs, split.ignore_merges) | _words(split), split.add_bos


def _pairs(words: Vocabulary, ids: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Read the merges; both parts and what they join to must be tokens."""
    merges = words.metadata.get(f"{PREFIX}merges")
    if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges):
        raise words.error(f"{PREFIX}merges is missing, or no list of texts")
    pairs = [tuple(merge.partition(" ")[::2]) for merge in merges]
    for left, right in pairs:
        if left not in ids or right not in ids or left + right not in ids:
            raise words.error(f"{PREFIX}merges joins {left!r} and {right!r}, which are not all tokens")
    return pairs


def _words(split: TextSplit) -> dict[str, Any]:
    """The pre-tokenizer that splits a text into words, and writes their bytes as characters."""
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    parts = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in split.patterns
    ]
    return {
        "normalizer": {"type": split.normalizer} if split.normalizer else None,
        "pre_tokenizer": {
            "type": "Sequence", "pretokenizers": [*parts, {**to_bytes, "use_regex": split.words}],
        },
        "decoder": {**to_bytes, "use_regex": True},
    }  # fmt: skip


def _sentencepiece(words: Vocabulary, merged: bool) -> dict[str, Any]:
    """Make BPE as in SentencePiece: all pairs that join to a token merge, the best score first. `merged`: the
    file has a list of merges, which are taken instead.
    """
    scores = words.metadata.get(f"{PREFIX}scores")
    if not merged and words.metadata.get(f"{PREFIX}merges") is not None:
        raise words.error(f"{PREFIX}merges together with {PREFIX}model llama is not supported")
    if not isinstance(scores, np.ndarray) or len(scores) != len(words.tokens):
        raise words.error(f"{PREFIX}scores is missing, or not a number for each token")
    texts = [
        token.replace("▁", " ") if kind == USER_DEFINED else token
        for token, kind in zip(words.tokens, words.kinds, strict=True)
    ]
    ids = {token: index for index, token in reversed(list(enumerate(texts)))}
    normal = words.of_kind(NORMAL)
    if words.architecture.startswith("gemma"):
        # the ids of these tokens are in the order of merges, but their scores are not
        best = dict.fromkeys(normal, 0.0)
    else:
        best = {token: -float(scores[token]) for token in normal}
    unknown = words.token("unknown_token_id")
    unknown = next(iter(words.of_kind(UNKNOWN)), None) if unknown is None else unknown
    merges = _pairs(words, ids) if merged else bpe_merges(ids, texts, best)
    prefix = words.get("add_space_prefix", bool, True)
    return byte_fallback_model(ids, merges, None if unknown is None else texts[unknown], prefix)


def _added(words: Vocabulary) -> list[dict[str, Any]]:
    """The added tokens, which are matched as wholes in a text: unknown, control and user-defined tokens."""
    special = set(words.of_kind(UNKNOWN, CONTROL))
    plain = words.get("model", str, "") in SPACED
    seen: set[str] = set()
    added = []
    for token in words.of_kind(UNKNOWN, CONTROL, USER_DEFINED):
        text = words.tokens[token]
        text = text.replace("▁", " ") if plain and token not in special else text
        if not text or text in seen:
            continue
        seen.add(text)
        entry = {"single_word": False, "lstrip": False, "rstrip": _takes_space(words, text, token in special)}
        added.append(
            {"id": token, "content": text, **entry, "normalized": False, "special": token in special}
        )
    return added


def _takes_space(words: Vocabulary, text: str, special: bool) -> bool:
    """Whether a token also matches the spaces after it (rstrip). Phi-3's tokens do, as published; a GGUF file
    does not say which.
    """
    if words.architecture != "phi3" or words.get("model", str, "") != "llama":
        return False
    return text == "</s>" or (special and text not in KEEPS_SPACE)


def _around(words: Vocabulary, add_bos: bool) -> dict[str, Any] | None:
    """The post-processor that adds BOS and EOS to a text; None where it adds neither."""
    asked = {
        "bos_token_id": words.get("add_bos_token", bool, add_bos),
        "eos_token_id": words.get("add_eos_token", bool, False),
    }
    ids = {key: words.token(key) if on else None for key, on in asked.items()}
    bos, eos = ids["bos_token_id"], ids["eos_token_id"]
    if bos is None and eos is None:
        return None
    used = {words.tokens[token]: token for token in (bos, eos) if token is not None}

    def parts(sequence: str, kind: int) -> list[dict[str, Any]]:
        def mark(token: int | None) -> list[dict[str, Any]]:
            if token is None:
                return []
            return [{"SpecialToken": {"id": words.tokens[token], "type_id": kind}}]

        return [*mark(bos), {"Sequence": {"id": sequence, "type_id": kind}}, *mark(eos)]

    return {
        "type": "TemplateProcessing",
        "single": parts("A", 0),
        "pair": [*parts("A", 0), *parts("B", 1)],
        "special_tokens": {text: {"id": text, "ids": [i], "tokens": [text]} for text, i in used.items()},
    }


def _templates(words: Vocabulary) -> ChatTemplates:
    """The chat templates: the default one, and named ones such as the one for tools, which llama.cpp writes
    under keys of their own.
    """
    keys = {TEMPLATE: "tokenizer.chat_template", TOOL_TEMPLATE: "tokenizer.chat_template.tool_use"}
    found = {name: text for name, key in keys.items() if (text := words.metadata.get(key)) is not None}
    if wrong := [keys[name] for name, text in found.items() if not isinstance(text, str)]:
        raise words.error(f"{wrong[0]} is not a string")
    return find_templates({}, found)


def _ends(words: Vocabulary) -> tuple[int, ...]:
    """The end tokens: the file's own first, then others that end a turn."""
    named = [token for key in ENDS if (token := words.token(key)) is not None]
    control = [token for token in words.of_kind(CONTROL) if words.tokens[token] in ENDINGS]
    return tuple(dict.fromkeys([*named, *control]))
