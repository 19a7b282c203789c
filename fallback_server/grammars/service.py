"""Compiling off the event loop, in child processes within limits of time, memory and size.

A hostile grammar can cost any amount of time and memory. A thread cannot be stopped; a process can.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nearfar.fallback_server.backend import Grammar
from nearfar.fallback_server.grammars.compiled import CompiledGrammars
from nearfar.fallback_server.sandbox import ChildPool, ChildSpec


class GrammarService:
    """Compiles grammars for one vocabulary; a grammar that several wait for is compiled once, those made lately are kept."""

    PROCESSES = 2
    """So that one slow grammar does not hold up all others; the second starts when both are needed."""
    KEPT_CHARS = 64 << 20

    def __init__(
        self, directory: Path, vocab_size: int, eos: Sequence[int], *, timeout: float, compiled_bytes: int = 64 << 20
    ) -> None:
        """`timeout`: seconds for one grammar, the start of its process not counted. `compiled_bytes`: the most it may become."""
        settings = {
            "directory": str(directory), "vocab_size": vocab_size, "eos": list(eos), "compiled_bytes": compiled_bytes,
        }  # fmt: skip
        module = f"{__package__}.child"
        self._pool = ChildPool(ChildSpec(module, settings, "grammar", self.PROCESSES, timeout=timeout, waiting=16))
        self._loaded = CompiledGrammars(directory, vocab_size, eos)
        self._kept: OrderedDict[Grammar, str] = OrderedDict()
        self._under_way: dict[Grammar, asyncio.Task[str]] = {}

    async def compiled(self, grammar: Grammar) -> str:
        """The grammar as CompiledGrammars.load takes it.

        RequestError: it does not compile, or not within the limits. OverloadError: too many wait.
        """
        if grammar in self._kept:
            self._kept.move_to_end(grammar)
            return self._kept[grammar]
        task = self._under_way.get(grammar)
        if task is None:
            task = self._under_way[grammar] = asyncio.create_task(self._compile(grammar))
            task.add_done_callback(lambda _: self._under_way.pop(grammar, None))
        return await asyncio.shield(task)  # others may wait for it too

    async def matcher(self, grammar: Grammar) -> Any:
        """A fresh xgrammar.GrammarMatcher, for sampling in this process."""
        made: Any = self._loaded.known(grammar)
        if made is None:
            made = await asyncio.to_thread(self._loaded.load, grammar, await self.compiled(grammar))
        import xgrammar  # loaded by now, in a thread: it brings PyTorch with it, which takes seconds

        return xgrammar.GrammarMatcher(made)

    async def close(self) -> None:
        """End the compiling processes."""
        for task in list(self._under_way.values()):
            task.cancel()
        await self._pool.close()

    async def _compile(self, grammar: Grammar) -> str:
        answer = await self._pool.run({"kind": grammar.kind, "text": grammar.text})
        compiled: str = answer["compiled"]
        self._kept[grammar] = compiled
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > self.KEPT_CHARS:
            self._kept.popitem(last=False)
        return compiled
