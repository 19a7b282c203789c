"""Grammars are tried out in child processes, within limits of time, memory and size, before the process that
samples compiles them.

A hostile grammar can cost any amount of time and memory. A thread cannot be stopped; a process can. What a
child has compiled takes no more of either here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from nearfar.edge_runtime.grammars import Grammar
from nearfar.edge_runtime.grammars.kept import Kept, key_of
from nearfar.errors import NearfarError, RequestError
from nearfar.fallback_server.grammars.compiled import CompiledGrammars
from nearfar.fallback_server.grammars.constraint import follow
from nearfar.fallback_server.sandbox import ChildPool, ChildSpec
from nearfar.format.answers import AnswerFormat
from nearfar.format.manifest import plain

log = logging.getLogger(__name__)

MEMORY = 2 << 30
"""Bytes that a child may hold: half a gigabyte of it is xgrammar with a large vocabulary. The process that
samples needs no more for a grammar than the child had left.
"""


T = TypeVar("T")


class GrammarService:
    """The grammars of one vocabulary; a grammar that several wait for is tried and compiled once."""

    PROCESSES = 2
    """Compiler processes: with two, one slow grammar does not hold up all others. The second starts when
    needed.
    """
    TRIED = 4096
    """Grammars for which the service remembers how many bytes they hold."""

    def __init__(
        self,
        directory: Path,
        vocab_size: int,
        eos: Sequence[int],
        answers: AnswerFormat | None = None,
        *,
        timeout: float,
        compiled_bytes: int = 64 << 20,
    ) -> None:
        """`answers`: how the model marks its answers, None: as the directory shows. `timeout`: seconds for
        one grammar, the start of its process not counted. `compiled_bytes`: the most it may hold, compiled.
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
            ChildSpec(module, settings, "grammar", self.PROCESSES, timeout=timeout, waiting=16, memory=MEMORY)
        )
        self._loaded = CompiledGrammars(directory, vocab_size, eos, answers)
        self._tried: Kept[str, int] = Kept(self.TRIED)
        self._trying: dict[str, asyncio.Task[int]] = {}
        self._loading: dict[str, asyncio.Task[Any]] = {}
        self._warming: asyncio.Task[None] | None = None

    def start(self, *, here: bool) -> None:
        """Start the compiler beside what goes on, so that the first grammar need not wait for it.

        `here`: answers are sampled in this process, which then needs xgrammar too.
        """
        self._warming = asyncio.create_task(self._warm(here))

    async def bytes_of(self, grammar: Grammar) -> int:
        """What the grammar holds when it is compiled; from then on CompiledGrammars.load may compile it.

        RequestError: it does not compile, or not within the limits. OverloadError: too many wait.
        """
        key = key_of(grammar)
        if (known := self._tried.get(key)) is not None:
            return known
        if (lack := _lacking()) is not None:
            raise RequestError(lack)
        return await _once(self._trying, key, lambda: self._try(key, grammar))

    async def matcher(self, grammar: Grammar, stops: frozenset[int]) -> Any:
        """A fresh xgrammar.GrammarMatcher, for sampling in this process. `stops`: tokens that may end the
        text.
        """
        key = key_of(grammar)
        made: Any = self._loaded.known(key)
        if made is None:
            await self.bytes_of(grammar)
            load = partial(asyncio.to_thread, self._loaded.load, key, grammar)
            made = await _once(self._loading, key, load)
        return follow(made, stops)

    async def close(self) -> None:
        """End the compiling processes."""
        warming = [self._warming] if self._warming else []
        for task in (*self._trying.values(), *self._loading.values(), *warming):
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
        except* (NearfarError, ImportError) as errors:  # who asks for a grammar is told again
            log.warning("grammars cannot be compiled: %s", errors.exceptions[0])

    async def _try(self, key: str, grammar: Grammar) -> int:
        answer = await self._pool.run({"kind": grammar.kind, "text": grammar.text})
        size: int = answer["bytes"]
        self._tried.put(key, size, 1)
        return size


async def _once(
    under_way: dict[str, asyncio.Task[T]], key: str, work: Callable[[], Coroutine[Any, Any, T]]
) -> T:
    """What comes of the work, which is done once for all who wait for it at the same time."""
    task = under_way.get(key)
    if task is None:
        task = under_way[key] = asyncio.create_task(work())
        task.add_done_callback(lambda _: under_way.pop(key, None))
    return await asyncio.shield(task)  # others may wait for it too


def _lacking() -> str | None:
    """What is told where the library is not installed, as with the extra `front` alone."""
    if find_spec("xgrammar") is not None:
        return None
    return "grammars (response_format, tools) need xgrammar on the server: pip install 'nearfar[server]'"
