"""Compiles grammars off the event loop, in child processes with limits on time, memory and size.

A hostile grammar can cost any amount of time and memory. A thread cannot be stopped; a process can.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nearfar.edge_runtime.grammars import Grammar
from nearfar.edge_runtime.grammars.bounded import BoundedCache, key_of
from nearfar.errors import NearfarError, RequestError
from nearfar.fallback_server.grammars.compiled import CompiledGrammars
from nearfar.fallback_server.grammars.constraint import follow
from nearfar.fallback_server.sandbox import ChildPool, ChildSpec
from nearfar.format.answers import AnswerFormat
from nearfar.format.conversion import plain

log = logging.getLogger(__name__)


class GrammarService:
    """Compiles grammars for one vocabulary. A grammar that several requests wait for is compiled once;
    recently compiled ones are kept.
    """

    PROCESSES = 2
    """Compiler processes: with two, one slow grammar does not delay all others. The second starts when
    needed.
    """

    def __init__(
        self,
        directory: Path,
        vocab_size: int,
        eos: Sequence[int],
        answers: AnswerFormat | None = None,
        *,
        timeout: float,
        compiled_bytes: int = 64 << 20,
        kept_bytes: int = 64 << 20,
    ) -> None:
        """`answers`: how the model marks its answers; None means as the directory shows. `timeout`: seconds
        of processor time for one grammar, without the start of its process. `compiled_bytes`: the largest
        compiled grammar.
        """
        settings = {
            "directory": str(directory),
            "vocab_size": vocab_size,
            "eos": list(eos),
            "answers": None if answers is None else plain(answers),
            "compiled_bytes": compiled_bytes,
        }
        module = f"{__package__}.child"
        self._pool = ChildPool(
            ChildSpec(module, settings, "grammar", self.PROCESSES, timeout=timeout, waiting=16)
        )
        self._loaded = CompiledGrammars(directory, vocab_size, eos, answers)
        self._kept: BoundedCache[str, str] = BoundedCache(kept_bytes)
        self._under_way: dict[str, asyncio.Task[str]] = {}
        self._warming: asyncio.Task[None] | None = None

    def start(self, *, here: bool) -> None:
        """Start the compiler in the background, so that the first grammar does not wait for it.

        `here`: answers are sampled in this process, which then needs xgrammar too.
        """
        self._warming = asyncio.create_task(self._warm(here))

    async def compiled(self, grammar: Grammar) -> str:
        """Return the grammar as CompiledGrammars.load takes it.

        Raises RequestError where it does not compile within the limits, OverloadError where too many wait.
        """
        key = key_of(grammar)
        if (kept := self._kept.get(key)) is not None:
            return kept
        if (lack := _lacking()) is not None:
            raise RequestError(lack)
        task = self._under_way.get(key)
        if task is None:
            task = self._under_way[key] = asyncio.create_task(self._compile(key, grammar))
            task.add_done_callback(lambda _: self._under_way.pop(key, None))
        return await asyncio.shield(task)  # other requests may wait for the same task

    async def matcher(self, grammar: Grammar, stops: frozenset[int]) -> Any:
        """Return a fresh xgrammar.GrammarMatcher for sampling in this process. `stops`: tokens that may end
        the text.
        """
        key = key_of(grammar)
        made: Any = self._loaded.known(key)
        if made is None:
            made = await asyncio.to_thread(self._loaded.load, key, await self.compiled(grammar))
        return follow(made, stops)

    async def close(self) -> None:
        """End the compiling processes."""
        for task in (*self._under_way.values(), *([self._warming] if self._warming else ())):
            task.cancel()
        await self._pool.close()

    async def _warm(self, here: bool) -> None:
        if (lack := _lacking()) is not None:
            log.info(lack)
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pool.warm(1))
                if here:
                    group.create_task(asyncio.to_thread(self._loaded.warm))
        # the error is told again to the requests that need a grammar
        except* (NearfarError, ImportError) as errors:
            log.warning("grammars cannot be compiled: %s", errors.exceptions[0])

    async def _compile(self, key: str, grammar: Grammar) -> str:
        answer = await self._pool.run({"kind": grammar.kind, "text": grammar.text})
        compiled: str = answer["compiled"]
        self._kept.put(key, compiled, len(compiled))
        return compiled


def _lacking() -> str | None:
    """The message where xgrammar is not installed, as with the extra `front` alone; else None."""
    if find_spec("xgrammar") is not None:
        return None
    return "grammars (response_format, tools) need xgrammar on the server: pip install 'nearfar[server]'"
