"""Compiles grammars with xgrammar for a model's vocabulary, and loads them: text between processes, objects
within one.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nearfar.edge_runtime.grammars import Grammar
from nearfar.edge_runtime.grammars.blame import blamed, schema_tags
from nearfar.edge_runtime.grammars.bounded import BoundedCache
from nearfar.edge_runtime.grammars.schema import narrowed
from nearfar.edge_runtime.grammars.typed import Schema
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.errors import RequestError
from nearfar.format.answers import AnswerFormat

BLANKS = 16
"""Longest run of blanks that JSON may have: small models would write blanks for ever."""
CALL_BLANKS = 1
"""Longest run of blanks in a tool's arguments, where blanks have no use."""


def vocabulary(
    directory: Path, vocab_size: int, eos: Sequence[int], answers: AnswerFormat | None = None
) -> Any:
    """Return xgrammar's TokenizerInfo for the tokenizer in a directory: the bytes of every token, empty for
    special ones.
    """
    import xgrammar

    codec = TextCodec.open_directory(directory, None, answers)
    special = {
        number for number, token in codec.tokenizer.get_added_tokens_decoder().items() if token.special
    }
    pieces = [b"" if number in special else codec.token_bytes(number) for number in range(vocab_size)]
    return xgrammar.TokenizerInfo(pieces, vocab_size=vocab_size, stop_token_ids=list(eos))


def compiler(info: Any) -> Callable[[Grammar], Any]:
    """Return a compiler of grammars for what `vocabulary` returned. It raises RequestError that says what is
    wrong with a grammar.
    """
    import xgrammar

    made = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compiles(schema: Schema) -> bool:
        try:
            made.compile_json_schema(json.dumps(schema), max_whitespace_cnt=CALL_BLANKS)
        except (RuntimeError, ValueError, TypeError, LookupError):
            return False
        return True

    def compile_grammar(grammar: Grammar) -> Any:
        schemas: list[Schema] = []
        try:
            match grammar.kind:
                case "json_object":
                    anything = '{"type": "object", "additionalProperties": true}'
                    return made.compile_json_schema(anything, max_whitespace_cnt=BLANKS)
                case "json_schema":
                    schemas = [narrowed(json.loads(grammar.text), strict=True, param="response_format")]
                    return made.compile_json_schema(json.dumps(schemas[0]), max_whitespace_cnt=BLANKS)
                case "regex":
                    return made.compile_regex(grammar.text)
                case "ebnf":
                    return made.compile_grammar(grammar.text)
                case "structural_tag":
                    tag = _with_narrowed(json.loads(grammar.text))
                    schemas = [one["json_schema"] for one in schema_tags(tag)]
                    return made.compile_structural_tag(tag)
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            for schema in schemas:
                if not compiles(schema):
                    raise RequestError(
                        f"{grammar.param}: {blamed(schema, compiles)}", grammar.param
                    ) from error
            raise RequestError(
                f"{grammar.param}: the {grammar.called} cannot be compiled: {_first_line(error)}",
                grammar.param,
            ) from error

    return compile_grammar


def _with_narrowed(record: Any) -> Any:
    """Return a structural tag with its JSON schemas rewritten to forms that xgrammar enforces."""
    if isinstance(record, list):
        return [_with_narrowed(one) for one in record]
    if not isinstance(record, dict):
        return record
    if record.get("type") != "json_schema":
        return {key: _with_narrowed(value) for key, value in record.items()}
    strict, param = record.get("strict", True), record.get("param", "response_format")
    # xgrammar stores a mask for each blank that it allows.
    most = {} if record.get("spaced") else {"max_whitespace_cnt": CALL_BLANKS if param == "tools" else BLANKS}
    schema = narrowed(record["json_schema"], strict=strict, param=param)
    return {"type": "json_schema", "json_schema": schema, **most}


class CompiledGrammars:
    """Compiled grammars of one vocabulary, loaded from the text that travels between processes. Recently used
    ones are kept.

    May be called from several threads. `kept_bytes` bounds the kept grammars; grammars in use are not
    counted.
    """

    def __init__(
        self,
        directory: Path,
        vocab_size: int,
        eos: Sequence[int],
        answers: AnswerFormat | None = None,
        *,
        kept_bytes: int = 256 << 20,
    ) -> None:
        self._of = (directory, vocab_size, eos, answers)
        self._lock = threading.Lock()
        self._kept: BoundedCache[str, Any] = BoundedCache(kept_bytes)
        self._info: Any = None

    def warm(self) -> None:
        """Load xgrammar, which brings PyTorch with it, and the vocabulary."""
        with self._lock:
            self._info = self._info or vocabulary(*self._of)

    def known(self, key: str) -> Any | None:
        """The compiled grammar of this key (`key_of`); None if it is not kept."""
        with self._lock:
            return self._kept.get(key)

    def load(self, key: str, compiled: str) -> Any:
        """Return an xgrammar.CompiledGrammar. Raises RequestError where this xgrammar rejects the text."""
        if (known := self.known(key)) is not None:
            return known
        import xgrammar

        self.warm()
        try:
            made = xgrammar.CompiledGrammar.deserialize_json(compiled, self._info)
        except (RuntimeError, ValueError) as error:
            raise RequestError(
                f"the compiled grammar cannot be used: {_first_line(error)}", "response_format"
            ) from error
        with self._lock:
            self._kept.put(key, made, max(len(compiled), made.memory_size_bytes))
        return made

    def forget(self, key: str) -> None:
        """Drop the grammar of this key."""
        with self._lock:
            self._kept.drop(key)


_SOURCE = re.compile(r"^\[[\d:]+\] \S+:\d+: (?:Check failed: .*? is false: )?")
"""The prefix of xgrammar's messages: a time, and a place in its source."""


def _first_line(error: Exception) -> str:
    lines = [line for part in str(error).splitlines() if (line := _SOURCE.sub("", part.strip()))]
    return (lines[0] if lines else type(error).__name__)[:300]
