"""xgrammar's compiler for a model's vocabulary, and what it makes."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nearfar.edge_runtime.grammars import Grammar
from nearfar.edge_runtime.grammars.blame import blamed, schema_tags
from nearfar.edge_runtime.grammars.kept import Kept
from nearfar.edge_runtime.grammars.schema import narrowed
from nearfar.edge_runtime.grammars.typed import Schema
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.edge_runtime.tools.asking import AUTO, answer_grammar
from nearfar.errors import RequestError
from nearfar.format.answers import AnswerFormat

BLANKS = 16
"""Blanks in a row that JSON may have: small models would go on with them for ever."""
CALL_BLANKS = 1
"""Blanks in a row in a tool's arguments, which nobody reads."""
SHARED_BYTES = 96 << 20
"""What xgrammar may keep of the rules that grammars share, and of whole grammars."""
USUAL: Schema = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "whole": {"type": "integer"},
        "number": {"type": "number"},
        "flag": {"type": "boolean"},
        "list": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["text"],
}

Compile = Callable[[Grammar], Any]
"""Makes an xgrammar.CompiledGrammar of a grammar. RequestError says what is wrong with it."""


def open_compiler(
    directory: Path, vocab_size: int, eos: Sequence[int], answers: AnswerFormat | None = None
) -> Compile:
    """The compiler for the tokenizer in a directory. It has compiled the rules that most grammars have: with
    a vocabulary of 151,936 tokens they take 0.3 s of the 0.5 s of a first request with tools.
    """
    codec = TextCodec.open_directory(directory, None, answers)
    compile_grammar = compiler(vocabulary(codec, vocab_size, eos))
    for grammar in usual(codec.answers):
        compile_grammar(grammar)
    return compile_grammar


def usual(form: AnswerFormat) -> Iterator[Grammar]:
    """Grammars whose rules most others have, too: those of JSON, and of calls as the model writes them."""
    yield Grammar("json_object", "")
    yield Grammar("json_schema", json.dumps(USUAL))
    calls = answer_grammar(form, [{"function": {"name": "usual", "parameters": USUAL}}], AUTO, None, False)
    if calls is not None:
        yield calls


def vocabulary(codec: TextCodec, vocab_size: int, eos: Sequence[int]) -> Any:
    """What xgrammar has to know of a tokenizer: the bytes of every token, none for special ones."""
    import xgrammar

    special = {
        number for number, token in codec.tokenizer.get_added_tokens_decoder().items() if token.special
    }
    pieces = [b"" if number in special else codec.token_bytes(number) for number in range(vocab_size)]
    return xgrammar.TokenizerInfo(pieces, vocab_size=vocab_size, stop_token_ids=list(eos))


def compiler(info: Any) -> Compile:
    """Compiles grammars for what `vocabulary` gave. Several threads may call it."""
    import xgrammar

    made = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=SHARED_BYTES)

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
            kind = grammar.kind.replace("_", " ")
            raise RequestError(
                f"the {kind} cannot be compiled: {_first_line(error)}", grammar.param
            ) from error

    return compile_grammar


def _with_narrowed(record: Any) -> Any:
    """A structural tag whose JSON schemas are such as xgrammar keeps to."""
    if isinstance(record, list):
        return [_with_narrowed(one) for one in record]
    if not isinstance(record, dict):
        return record
    if record.get("type") != "json_schema":
        return {key: _with_narrowed(value) for key, value in record.items()}
    strict, param = record.get("strict", True), record.get("param", "response_format")
    # Of many blanks xgrammar stores a mask for each.
    most = {} if record.get("spaced") else {"max_whitespace_cnt": CALL_BLANKS if param == "tools" else BLANKS}
    schema = narrowed(record["json_schema"], strict=strict, param=param)
    return {"type": "json_schema", "json_schema": schema, **most}


class CompiledGrammars:
    """Compiled grammars of one vocabulary, made in this process; those used lately are kept.

    They are compiled here again after another process has shown that this takes little (GrammarService):
    xgrammar's text of a compiled grammar grows with the square of its rules, to 200 MB for 20 tools, and
    takes longer to write and read than the grammar to compile.

    May be called from several threads. `kept_bytes` bounds what is kept; what is in use lives on beside it.
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
        self._opening, self._lock = threading.Lock(), threading.Lock()
        self._kept: Kept[str, Any] = Kept(kept_bytes)
        self._compile: Compile | None = None

    def warm(self) -> Compile:
        """Load xgrammar, which brings PyTorch with it, and the vocabulary."""
        with self._opening:
            self._compile = self._compile or open_compiler(*self._of)
        return self._compile

    def known(self, key: str) -> Any | None:
        """The compiled grammar of this key (`key_of`), if it is kept."""
        with self._lock:
            return self._kept.get(key)

    def load(self, key: str, grammar: Grammar) -> Any:
        """An xgrammar.CompiledGrammar, kept under the key. RequestError where it does not compile."""
        if (known := self.known(key)) is not None:
            return known
        made = self.warm()(grammar)
        with self._lock:
            self._kept.put(key, made, made.memory_size_bytes)
        return made

    def forget(self, key: str) -> None:
        """Keep it no longer."""
        with self._lock:
            self._kept.drop(key)


_SOURCE = re.compile(r"^\[[\d:]+\] \S+:\d+: (?:Check failed: .*? is false: )?")
"""What xgrammar's messages begin with: a time, and a place in its source."""


def _first_line(error: Exception) -> str:
    lines = [line for part in str(error).splitlines() if (line := _SOURCE.sub("", part.strip()))]
    return (lines[0] if lines else type(error).__name__)[:300]
