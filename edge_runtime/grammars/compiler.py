"""Compiles grammars with llguidance, in this process: the library bounds its own time and memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

from nearfar.edge_runtime.grammars.blame import blamed, schema_tags
from nearfar.edge_runtime.grammars.bounded import BoundedCache, key_of
from nearfar.edge_runtime.grammars.constraint import GrammarConstraint, why
from nearfar.edge_runtime.grammars.grammar import Grammar
from nearfar.edge_runtime.grammars.schema import narrowed
from nearfar.edge_runtime.grammars.spelled import spelled_out
from nearfar.edge_runtime.grammars.structural import lark_of
from nearfar.edge_runtime.grammars.typed import Schema
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.errors import RequestError

BLANKS = r"[\x20\x0A\x0D\x09]{0,16}"
"""Blanks between the parts of JSON: a small model might otherwise write blanks without end."""
CALL_BLANKS = r"[\x20\x0A\x0D\x09]?"
"""Blanks between the parts of a tool's arguments, which users do not read."""
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 8_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
}
"""Bounds in llguidance's units: about 20 ms to begin, 15 ms a token, and 40 MB of states in each running
answer.
"""
MOST_RULES = 500
"""The most rules of an EBNF grammar: parsing takes time in their square, 0.4 s for 500."""
KEPT = 16
"""The number of compiled grammars that are cached."""
MISSING = "llguidance, which is not installed: pip install 'nearfar[edge,grammars]'"


def available() -> bool:
    """Whether llguidance is installed."""
    return find_spec("llguidance") is not None


class Grammars:
    """The compiled grammars of one vocabulary. Methods with an underscore run in the compile thread."""

    def __init__(self, codec: TextCodec, vocab_size: int, eos: Sequence[int]) -> None:
        self._codec, self._vocab_size, self._eos = codec, vocab_size, list(eos)
        self._kept: BoundedCache[str, Any] = BoundedCache(KEPT)
        self._tokenizer: Any = None
        self._pool: ThreadPoolExecutor | None = None

    async def constraints(
        self, grammar: Grammar, count: int, *, ignore_eos: bool = False
    ) -> list[GrammarConstraint]:
        """Return `count` constraints at the start of a grammar.

        RequestError says what is wrong with the grammar, or what to install. `ignore_eos`: an answer may end
        only where the grammar allows nothing else.
        """
        if not available():
            raise RequestError(f"{grammar.param} needs {MISSING}", grammar.param)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="nearfar-grammars")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._constraints, grammar, count, ignore_eos)

    def close(self) -> None:
        """End the thread once its work is done."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def _constraints(self, grammar: Grammar, count: int, ignore_eos: bool) -> list[GrammarConstraint]:
        key = key_of(grammar)
        matcher = self._kept.get(key)
        if matcher is None:
            matcher = self._compile(grammar)
            self._kept.put(key, matcher, 1)
        ends = ends_of(self._codec, self._vocab_size, self._eos)
        return [
            GrammarConstraint(
                matcher.deep_copy(), self._vocab_size, grammar.param, ends, ignore_eos=ignore_eos
            )
            for _ in range(count)
        ]

    def _compile(self, grammar: Grammar) -> Any:
        """A llguidance.LLMatcher that has already computed its first mask."""
        import llguidance

        kind = grammar.called
        self._tokenizer = self._tokenizer or tokenizer(self._codec, self._vocab_size, self._eos)
        try:
            text = _text(grammar)
            limits = llguidance.LLParserLimits(**LIMITS, verbose_errors=False)
            matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
            first = matcher.deep_copy()
            if not first.is_error():
                first.compute_bitmask()
        except RequestError:
            raise
        except RecursionError as error:
            raise RequestError(
                f"{grammar.param}: the {kind} is nested too deeply; make it flatter", grammar.param
            ) from error
        except Exception as error:  # the EBNF reader raises plain exceptions, and the library raises any kind
            raise _refusal(grammar, str(error)) from error
        if first.is_error():
            for schema in _schemas(grammar):
                if not self._compiles(schema):
                    raise RequestError(f"{grammar.param}: {blamed(schema, self._compiles)}", grammar.param)
            raise _refusal(grammar, first.get_error())
        return matcher

    def _compiles(self, schema: Schema) -> bool:
        """Whether the library accepts a narrowed schema."""
        import llguidance

        try:
            text = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(spelled_out(schema)))
            limits = llguidance.LLParserLimits(**LIMITS, verbose_errors=False)
            matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
            if not matcher.is_error():
                matcher.compute_bitmask()
            return not matcher.is_error()
        except Exception:  # any error means that the part does not compile
            return False


def tokenizer(codec: TextCodec, vocab_size: int, eos: Sequence[int]) -> Any:
    """A tokenizer for llguidance: the bytes of its tokens, and how it tokenizes a text."""
    import llguidance

    ends = ends_of(codec, vocab_size, eos)
    words = _Words(codec, vocab_size, ends)
    made = llguidance.LLTokenizer(llguidance.TokenizerWrapper(words), n_vocab=vocab_size, eos_token=ends)
    words.greedy = made.greedy_tokenize
    return made


def ends_of(codec: TextCodec, vocab_size: int, eos: Sequence[int]) -> list[int]:
    """The tokens that end the text of a grammar.

    For a model without end tokens, a token without text stands for the end: otherwise a grammar that may be
    empty would end before the first token.
    """
    silent = (token for token in codec.silent if token < vocab_size)
    return list(eos) or [min(silent, default=vocab_size - 1)]


class _Words:
    """The tokenizer interface that llguidance expects."""

    bos_token_id = None

    def __init__(self, codec: TextCodec, vocab_size: int, ends: Sequence[int]) -> None:
        self._codec = codec
        self.tokens = [codec.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = sorted(token for token in {*codec.silent, *ends} if token < vocab_size)
        self.eos_token_id = ends[0]
        self.greedy: Any = None

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokenize text that a grammar prescribes as the model would.

        If the tokenizer changes the text (some put a blank before it), use the longest token that fits,
        repeatedly.
        """
        data = text.encode() if isinstance(text, str) else text
        tokens = self._codec.encode_raw(data.decode(errors="replace"))
        if b"".join(self.tokens[token] for token in tokens) == data:
            return tokens
        return list(self.greedy(data.decode(errors="replace"))) if self.greedy else []


def _text(grammar: Grammar) -> str:
    """Translate a grammar into llguidance's form."""
    from llguidance import LLMatcher

    match grammar.kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', {"whitespace_pattern": BLANKS})
        case "json_schema":
            schema = narrowed(json.loads(grammar.text), strict=True, param="response_format")
            text = json.dumps(spelled_out(schema))
            return LLMatcher.grammar_from_json_schema(text, {"whitespace_pattern": BLANKS})
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "ebnf":
            return LLMatcher.grammar_from_lark(_lark(grammar.text))
        case "structural_tag":
            return lark_of(
                json.loads(grammar.text)["format"],
                lambda param: CALL_BLANKS if param == "tools" else BLANKS,
                _lark,
            )


def _schemas(grammar: Grammar) -> list[Schema]:
    """The narrowed JSON schemas in a grammar."""
    if grammar.kind == "json_schema":
        return [narrowed(json.loads(grammar.text), strict=True, param="response_format")]
    if grammar.kind != "structural_tag":
        return []
    return [
        narrowed(tag["json_schema"], strict=tag.get("strict", True), param=tag.get("param", grammar.param))
        for tag in schema_tags(json.loads(grammar.text)["format"])
    ]


def _lark(ebnf: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if (count := ebnf.count("::=")) > MOST_RULES:
        raise RequestError(
            f"response_format: the grammar cannot be compiled: it has {count} rules, more than {MOST_RULES}",
            "response_format",
        )
    return str(gbnf_to_lark(ebnf))


def _refusal(grammar: Grammar, message: str) -> RequestError:
    what = "grammar of the calls" if grammar.param == "tools" else grammar.called
    return RequestError(f"{grammar.param}: the {what} cannot be compiled: {why(message)}", grammar.param)
