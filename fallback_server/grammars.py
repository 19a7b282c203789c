"""Grammars of answers, by xgrammar: compiled in a child process within limits, then matched token by token."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.edge_runtime.text import TextCodec
from nearfar.errors import RequestError
from nearfar.fallback_server.backend import Grammar
from nearfar.fallback_server.engines.markup import VISIBLE
from nearfar.fallback_server.engines.tools import WHITESPACE
from nearfar.fallback_server.sandbox import ChildPool, ChildSpec

log = logging.getLogger(__name__)


def vocabulary(codec: TextCodec, vocab_size: int, eos: list[int]) -> Any:
    """What xgrammar has to know of a tokenizer: the bytes of every token, none for special ones."""
    import xgrammar

    special = {number for number, token in codec.tokenizer.get_added_tokens_decoder().items() if token.special}
    pieces = [b"" if number in special else codec.token_bytes(number) for number in range(vocab_size)]
    return xgrammar.TokenizerInfo(pieces, vocab_size=vocab_size, stop_token_ids=eos)


def compiler(info: Any) -> Callable[[Grammar], Any]:
    """Compiles a grammar; RequestError says what is wrong with it."""
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


class GrammarService:
    """Compiles grammars for one vocabulary off the event loop; what was compiled lately is kept."""

    KEPT = 32

    def __init__(
        self, directory: Path, vocab_size: int, eos: tuple[int, ...], *, timeout: float = 5.0, compiled_bytes: int = 64 << 20
    ) -> None:
        settings = {
            "directory": str(directory), "vocab_size": vocab_size, "eos": list(eos), "compiled_bytes": compiled_bytes,
        }  # fmt: skip
        spec = ChildSpec(f"{__package__}.sandbox.grammar_child", settings, "grammar", timeout=timeout, waiting=16)
        self._pool = ChildPool(spec)
        self._directory, self._vocab_size, self._eos = directory, vocab_size, list(eos)
        self._kept: dict[Grammar, Any] = {}
        self._under_way: dict[Grammar, asyncio.Task[Any]] = {}
        self._info: Any = None

    async def matcher(self, grammar: Grammar) -> Any:
        """A fresh xgrammar.GrammarMatcher. RequestError: the grammar does not compile, or not within the limits."""
        compiled: Any = self._kept.get(grammar)
        if compiled is None:
            task = self._under_way.get(grammar)
            if task is None:
                task = self._under_way[grammar] = asyncio.create_task(self._compile(grammar))
                task.add_done_callback(lambda _: self._under_way.pop(grammar, None))
            compiled = await asyncio.shield(task)  # others may wait for it too
        import xgrammar  # loaded by now, in a thread: it brings PyTorch with it, which takes seconds

        return xgrammar.GrammarMatcher(compiled)

    async def close(self) -> None:
        """End the compiling process."""
        for task in list(self._under_way.values()):
            task.cancel()
        await self._pool.close()

    async def _compile(self, grammar: Grammar) -> Any:
        answer = await self._pool.run({"kind": grammar.kind, "text": grammar.text})
        compiled = self._kept[grammar] = await asyncio.to_thread(self._load, answer["compiled"])
        if len(self._kept) > self.KEPT:
            del self._kept[next(iter(self._kept))]  # the oldest
        return compiled

    def _load(self, compiled: str) -> Any:
        import xgrammar

        if self._info is None:
            codec = TextCodec.open_directory(self._directory, None, VISIBLE)
            self._info = vocabulary(codec, self._vocab_size, self._eos)
        return xgrammar.CompiledGrammar.deserialize_json(compiled, self._info)


class TokenConstraint:
    """Which tokens a request may take: those of its grammar, and no end token before `min_tokens`.

    It never raises: the engine's loop serves other requests too. For the same reason a grammar whose matcher takes
    more than STEP_SECONDS of processor time for a token ends its request; ambiguous grammars get slower with each.
    """

    STEP_SECONDS = 0.1

    def __init__(self, matcher: Any | None, vocab_size: int, held: frozenset[int], min_tokens: int) -> None:
        self._matcher = matcher
        self._words = (vocab_size + 31) // 32
        self._held = sorted(token for token in held if token < vocab_size)
        self._min = min_tokens
        self._count = 0
        self._failed = False

    def allowed(self) -> npt.NDArray[Any]:
        """uint32 [(vocab_size+31)//32]."""
        row = np.full((1, self._words), -1, np.int32)
        if self._matcher is not None and not self._failed:
            self._timed(lambda matcher: matcher.is_terminated() or matcher.fill_next_token_bitmask(row))
        words: npt.NDArray[np.uint32] = row.view(np.uint32)[0]
        if self._count < self._min:
            for token in self._held:
                words[token // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token % 32))
        return words

    def accept(self, token: int) -> bool:
        """Move on by a token."""
        self._count += 1
        if self._matcher is None:
            return True
        taken = self._timed(lambda matcher: matcher.is_terminated() or matcher.accept_token(token))
        return taken and not self._failed

    def _timed(self, call: Callable[[Any], Any]) -> bool:
        start = time.thread_time()
        try:
            done = bool(call(self._matcher))
        except RuntimeError as error:
            log.warning("a grammar matcher failed: %s", error)
            done, self._failed = False, True
        if time.thread_time() - start > self.STEP_SECONDS:
            log.warning("a grammar takes too long to follow, and its request ends")
            self._failed = True
        return done


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
