"""Surface features of a prompt, as numbers, without a tokenizer. web/src/routing/difficulty.ts computes the
same.

These rules make the two languages agree: ASCII classes only in every pattern, ASCII lower case, typographic
signs folded to ASCII first, lone surrogates replaced by U+FFFD, lengths in code points.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

HALF = 4096
"""The code points that are read at either end of a prompt longer than twice that: the question is at the
beginning or at the end.
"""

Lexicon = Mapping[str, Sequence[int]]
"""Maps each word to the numbers of its categories."""

_FOLD = {
    ord(a): b
    for a, b in zip(
        "“”„«»‘’–—−…\u00a0\u3000。．？！，、；：؟،", '"""""\'\'---. \u0020..?!,,;:?,', strict=True
    )
}
_LOWER = {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}
_ANSWER = re.compile(r"\n *[Aa]nswer:? *\n*\Z")
_OPTION = re.compile(r"\n[ \t]*\(?[A-J][.):][ \t]+")
_WORD = re.compile(r"[a-z0-9'\u0080-\U0010ffff]+")
_NUMBER = re.compile(r"[0-9]+(?:[.,][0-9]+)*")
_SENTENCE = re.compile(r"[.!?]+(?=[ \t\r\n]|\Z)")
_CAPITAL = re.compile(r"(?<![A-Za-z])[A-Z][a-z]")
_CAPITALS = re.compile(r"(?<![A-Za-z])[A-Z]{2,}(?![A-Za-z])")
_EMPHASIS = re.compile(r"(?<![A-Za-z])(?:NOT|EXCEPT|LEAST|BEST|MOST)(?![A-Za-z])")


@dataclass(frozen=True)
class PromptParts:
    """A prompt split into the text that was read, the question without its options, and the options."""

    text: str
    stem: str
    options: tuple[str, ...]

    @property
    def choice(self) -> bool:
        """Whether the prompt is multiple choice."""
        return len(self.options) >= 2


def parts(prompt: str) -> PromptParts:
    """Shorten, fold, and split a prompt at lines that begin like `A. `, `B) ` or `(C) `. A closing `Answer:`
    is removed.
    """
    if len(prompt) > 2 * HALF:
        prompt = prompt[:HALF] + "\n" + prompt[-HALF:]
    try:
        prompt.encode()
    except UnicodeEncodeError:  # the text has lone surrogates
        prompt = prompt.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    text = _ANSWER.sub("", prompt.translate(_FOLD))
    stem, *options = _OPTION.split(text)
    return PromptParts(text, stem, tuple(options))


def words(text: str) -> list[str]:
    """Return runs of ASCII letters (in lower case), digits and apostrophes; every character beyond ASCII
    counts as a letter.
    """
    return _WORD.findall(text.translate(_LOWER))


def features(prompt: str, categories: Sequence[str], lexicon: Lexicon) -> tuple[bool, dict[str, float]]:
    """Return whether the prompt is multiple choice, and its features by name. The work is bounded: see
    HALF.
    """
    read = parts(prompt)
    stem, text = words(read.stem), words(read.text)
    found = _amount(read.stem, stem) | _presence(read.stem, stem, categories, lexicon)
    if read.choice:
        found |= _shape(read.text, text) | _options(read, stem) | _lexical(text, categories, lexicon)
    return read.choice, found


def _amount(stem: str, words: Sequence[str]) -> dict[str, float]:
    """Features of the amount to read and to keep in mind."""
    sentences = _count(_SENTENCE, stem)
    return {
        "stem_chars": math.log1p(len(stem)),
        "stem_sentences": math.log1p(sentences),
        "stem_sentence_words": math.log1p(len(words) / max(1, sentences)),
        "stem_distinct": len(set(words)) / max(1, len(words)),
        "stem_commas": math.log1p(stem.count(",")),
    }


def _presence(
    stem: str, words: Sequence[str], categories: Sequence[str], lexicon: Lexicon
) -> dict[str, float]:
    """Features of the kind of work: 0, 1/2 for one occurrence, 1 for two or more, so that length does not
    count twice.
    """
    seen = _tally(words, lexicon)
    found = {f"has_{name}": min(seen[at], 2) / 2 for at, name in enumerate(categories)}
    numbers = _count(_NUMBER, stem) + (seen[categories.index("number")] if "number" in categories else 0)
    return found | {
        "has_number": min(numbers, 2) / 2,
        "has_operator": min(_signs(stem, "+*/=^<>|~"), 2) / 2,
        "has_code": min(_signs(stem, "{}\\_;"), 2) / 2,
        "has_parenthesis": min(stem.count("("), 2) / 2,
        "has_quote": min(stem.count('"'), 2) / 2,
    }


def _shape(text: str, words: Sequence[str]) -> dict[str, float]:
    """Features of the whole text: lengths, digits, signs and capitals."""
    letters = [word for word in words if not "0" <= word[0] <= "9"]
    total, count, chars = max(1, len(letters)), max(1, len(words)), max(1, len(text))
    return {
        "chars": math.log1p(len(text)),
        "mean_word": sum(map(len, letters)) / total,
        "words_of_8": sum(len(word) >= 8 for word in letters) / total,
        "words_of_11": sum(len(word) >= 11 for word in letters) / total,
        "distinct": len(set(words)) / count,
        "number_share": (len(words) - len(letters)) / count,
        "numbers": math.log1p(len(words) - len(letters)),
        "digit_share": _signs(text, "0123456789") / chars,
        "operators": math.log1p(_signs(text, "+*/=^<>")),
        "brackets": math.log1p(_signs(text, "([")),
        "markup": math.log1p(_signs(text, "{\\$_")),
        "dollars": math.log1p(text.count("$")),
        "percents": math.log1p(text.count("%")),
        "quotes": math.log1p(text.count('"')),
        "lines": math.log1p(text.count("\n")),
        "capitals": _count(_CAPITAL, text) / count,
        "all_capitals": _count(_CAPITALS, text) / count,
        "comma_share": text.count(",") / count,
        "colon_share": _signs(text, ":;") / count,
        "hyphen_share": text.count("-") / count,
        "emphasis": float(_EMPHASIS.search(text) is not None),
        "blank": float("__" in text),
        "questions": math.log1p(text.count("?")),
        "single_letters": math.log1p(sum(len(word) == 1 and word not in "ais" for word in letters)),
    }


def _options(read: PromptParts, stem: Sequence[str]) -> dict[str, float]:
    """Features of the first ten options: their length, similarity, and share of numbers."""
    options = read.options[:10]
    split = [words(option) for option in options]
    sets = [set(option) for option in split]
    lengths = [len(option) for option in options]
    mean = sum(lengths) / len(lengths)
    asked, n = set(stem), len(options)
    pairs = [(a, b) for at, a in enumerate(sets) for b in sets[:at]]
    joined = read.text.translate(_LOWER)
    return {
        "option_chars": math.log1p(mean),
        "option_spread": math.log1p(math.sqrt(sum((length - mean) ** 2 for length in lengths) / n)),
        "option_numeric": sum(any("0" <= word[0] <= "9" for word in option) for option in split) / n,
        "option_short": sum(len(option) <= 2 for option in split) / n,
        "option_overlap": sum(len(option & asked) / max(1, len(option)) for option in sets) / n,
        "option_alike": sum(len(a & b) / max(1, len(a | b)) for a, b in pairs) / max(1, len(pairs)),
        "of_the_following": float("of the following" in joined),
        "all_or_none": float(any(some in joined for some in ("all of the", "none of the", "both "))),
        "statements": float(joined.startswith("statement 1")),
    }


def _lexical(words: Sequence[str], categories: Sequence[str], lexicon: Lexicon) -> dict[str, float]:
    """The number of words of each category, and their share of all words."""
    seen, total = _tally(words, lexicon), max(1, len(words))
    found = {f"log_{name}": math.log1p(seen[at]) for at, name in enumerate(categories)}
    return found | {f"share_{name}": seen[at] / total for at, name in enumerate(categories)}


def _tally(words: Iterable[str], lexicon: Lexicon) -> Counter[int]:
    seen: Counter[int] = Counter()
    for word in words:
        for category in lexicon.get(word, ()):
            seen[category] += 1
    return seen


def _count(pattern: re.Pattern[str], text: str) -> int:
    return sum(1 for _ in pattern.finditer(text))


def _signs(text: str, signs: str) -> int:
    return sum(map(text.count, signs))
