"""xgrammar's compiler for a model's vocabulary, and what it makes: as text between processes, as objects in them."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nearfar.edge_runtime.text import TextCodec
from nearfar.errors import RequestError
from nearfar.fallback_server.backend import Grammar
from nearfar.fallback_server.engines.markup import VISIBLE
from nearfar.fallback_server.engines.tools import WHITESPACE


def vocabulary(directory: Path, vocab_size: int, eos: Sequence[int]) -> Any:
    """What xgrammar has to know of the tokenizer in a directory: the bytes of every token, none for special ones."""
    import xgrammar

    codec = TextCodec.open_directory(directory, None, VISIBLE)
    special = {number for number, token in codec.tokenizer.get_added_tokens_decoder().items() if token.special}
    pieces = [b"" if number in special else codec.token_bytes(number) for number in range(vocab_size)]
    return xgrammar.TokenizerInfo(pieces, vocab_size=vocab_size, stop_token_ids=list(eos))


def compiler(info: Any) -> Callable[[Grammar], Any]:
    """Compiles a grammar for what `vocabulary` gave; RequestError says what is wrong with it."""
    import xgrammar

    made = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile_grammar(grammar: Grammar) -> Any:
        try:
            match grammar.kind:
                case "json_object":
                    anything = '{"type": "object", "additionalProperties": true}'
                    return made.compile_json_schema(anything, max_whitespace_cnt=WHITESPACE)
                case "json_schema":
                    return made.compile_json_schema(grammar.text, max_whitespace_cnt=WHITESPACE)
                case "regex":
                    return made.compile_regex(grammar.text)
                case "ebnf":
                    return made.compile_grammar(grammar.text)
                case "structural_tag":
                    return made.compile_structural_tag(json.loads(grammar.text))
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            kind = grammar.kind.replace("_", " ")
            raise RequestError(f"the {kind} cannot be compiled: {_first_line(error)}", "response_format") from error

    return compile_grammar


class CompiledGrammars:
    """Compiled grammars of one vocabulary, read from the text that travels between processes; those read lately are kept.

    May be called from several threads.
    """

    KEPT = 64

    def __init__(self, directory: Path, vocab_size: int, eos: Sequence[int]) -> None:
        self._of = (directory, vocab_size, eos)
        self._lock = threading.Lock()
        self._kept: OrderedDict[Grammar, Any] = OrderedDict()
        self._info: Any = None

    def known(self, grammar: Grammar) -> Any | None:
        """The compiled grammar, if it is kept."""
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
            return self._kept.get(grammar)

    def load(self, grammar: Grammar, compiled: str) -> Any:
        """An xgrammar.CompiledGrammar. RequestError where this xgrammar does not take the text."""
        if (known := self.known(grammar)) is not None:
            return known
        import xgrammar

        with self._lock:
            self._info = self._info or vocabulary(*self._of)
        try:
            made = xgrammar.CompiledGrammar.deserialize_json(compiled, self._info)
        except (RuntimeError, ValueError) as error:
            raise RequestError(f"the compiled grammar cannot be used: {_first_line(error)}", "response_format") from error
        with self._lock:
            self._kept[grammar] = made
            while len(self._kept) > self.KEPT:
                self._kept.popitem(last=False)
        return made


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
