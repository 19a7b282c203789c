"""The patterns that split texts into words before BPE, by the names of `tokenizer.ggml.pre`.

Each is the pattern of the models' own tokenizer.json, which llama.cpp's `llama-vocab.cpp` knows by that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
START = r"[^\r\n\p{L}\p{N}]?"
MARKS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"


def _letters(digits: str) -> str:
    return rf"{SHORT}|{START}\p{{L}}+|{digits}|{MARKS}|{SPACES}"


def _cased(short: str, digits: str) -> str:
    """A pattern that also cuts a word where its case changes from lower to upper."""
    return rf"{START}{UPPER}*{LOWER}+{short}|{START}{UPPER}+{LOWER}*{short}|{digits}|{MARKS_SLASH}|{SPACES}"


@dataclass(frozen=True)
class TextSplit:
    """How a text is split. `patterns`: each cuts out its matches. `words`: GPT-2's own splitting follows.
    `ignore_merges`: a word that is a token is not merged. `add_bos`: the default where the file does not say.
    """

    patterns: tuple[str, ...] = ()
    words: bool = False
    normalizer: str | None = None
    ignore_merges: bool = False
    add_bos: bool = False


PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
DEEPSEEK3 = TextSplit(
    (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        rf"{PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}",
    )
)
GPT2 = TextSplit(words=True)
DIGITS = TextSplit((r"\p{N}",), words=True)
LLAMA3 = TextSplit((_letters(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
SPLITS: Mapping[str, TextSplit] = {
    "gpt-2": GPT2,
    "phi-2": GPT2,
    "olmo": GPT2,
    "exaone4": GPT2,
    "smollm": DIGITS,
    "starcoder": DIGITS,
    "refact": DIGITS,
    "command-r": DIGITS,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "falcon-h1": LLAMA3,
    "lfm2": LLAMA3,
    "dbrx": TextSplit(LLAMA3.patterns),
    "smaug-bpe": TextSplit(LLAMA3.patterns),
    "chatglm-bpe": TextSplit(LLAMA3.patterns),
    "glm4": TextSplit(LLAMA3.patterns),
    "hunyuan-dense": DEEPSEEK3,
    "seed-coder": TextSplit((rf"{SHORT}|{START}\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}",)),
    "qwen2": TextSplit((_letters(r"\p{N}"),), normalizer="NFC"),
    "qwen35": TextSplit(
        (rf"{SHORT}|{START}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}",),
        normalizer="NFC",
    ),
    "deepseek-r1-qwen": TextSplit((_letters(r"\p{N}"),)),
    "tekken": TextSplit((_cased("", r"\p{N}"),), ignore_merges=True),
    "gpt-4o": TextSplit((_cased(f"{SHORT}?", r"\p{N}{1,3}"),)),
}
"""The splits, by llama.cpp's names."""
