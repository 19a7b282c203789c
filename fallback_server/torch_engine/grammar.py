"""Grammars by xgrammar: compiled in a process of their own, then followed token by token.

A hostile grammar can cost any amount of time and memory to compile. A thread cannot be stopped and shares the engine's
memory; a process can be killed and has a limit of its own (`grammar_process.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import xgrammar

from nearfar.errors import RequestError
from nearfar.fallback_server.backend import Grammar
from nearfar.fallback_server.torch_engine.options import TorchOptions

COMPILERS = 2  # so that one slow grammar does not hold up all others
KEPT = 128  # compiled grammars
RESULT_BYTES = 32 << 20  # of one compiled grammar


class Matcher:
    """Where an answer stands in its grammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, stops: frozenset[int], vocab: int) -> None:
        self._matcher = xgrammar.GrammarMatcher(
            compiled, override_stop_tokens=sorted(stops) or None, terminate_without_stop_token=not stops
        )
        self._mask = xgrammar.allocate_token_bitmask(1, vocab)

    def allowed(self) -> torch.Tensor:
        """Bitmask int32 [ceil(vocab / 32)] of the tokens that may come next."""
        self._matcher.fill_next_token_bitmask(self._mask, 0)
        return self._mask[0]

    def accept(self, token: int) -> bool:
        """Step over a token; whether the answer is complete. RequestError for a token that the grammar does not allow."""
        if not self._matcher.accept_token(token):
            raise RequestError(f"the grammar does not allow token {token}, which was the only choice", "response_format")
        return bool(self._matcher.is_terminated())


class GrammarCompiler:
    """Compiles grammars in the background; the same grammar once."""

    def __init__(self, path: Path, vocab: int, options: TorchOptions) -> None:
        self._command = [
            sys.executable,
            "-m",
            "nearfar.fallback_server.torch_engine.grammar_process",
            str(path),
            str(vocab),
            str(options.grammar_memory),
        ]
        self._options = options
        self._threads = ThreadPoolExecutor(COMPILERS, "response_format")
        self._idle: list[_Child] = []
        self._lock = threading.Lock()
        self._known: OrderedDict[Grammar, xgrammar.CompiledGrammar | RequestError] = OrderedDict()

    def compile(self, grammar: Grammar, done: Callable[[xgrammar.CompiledGrammar | RequestError], None]) -> None:
        """Call `done` from another thread with the compiled grammar or what is wrong with it."""
        self._threads.submit(lambda: done(self._get(grammar)))

    def close(self) -> None:
        """Stop the compilers."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for child in self._idle:
            child.kill()

    def _get(self, grammar: Grammar) -> xgrammar.CompiledGrammar | RequestError:
        with self._lock:
            if grammar in self._known:
                self._known.move_to_end(grammar)
                return self._known[grammar]
        result, lasting = self._compile(grammar)
        if lasting:
            with self._lock:
                self._known[grammar] = result
                while len(self._known) > KEPT:
                    self._known.popitem(last=False)
        return result

    def _compile(self, grammar: Grammar) -> tuple[xgrammar.CompiledGrammar | RequestError, bool]:
        """The compiled grammar or what is wrong, and whether it would be the same the next time."""
        with self._lock:
            child = self._idle.pop() if self._idle else None
        try:
            child = child or _Child(self._command, self._options.start_seconds)
        except (OSError, ValueError, TimeoutError) as error:
            return RequestError(f"this model cannot follow grammars: its tokenizer cannot be read ({error})", "response_format"), False
        try:
            answer = child.ask({"kind": grammar.kind, "text": grammar.text}, self._options.grammar_seconds)
        except TimeoutError:
            child.kill()
            limit = self._options.grammar_seconds
            return RequestError(f"the grammar took more than {limit:g} s to compile: make it smaller", "response_format"), False
        except (OSError, ValueError):
            child.kill()
            return RequestError("the grammar takes more memory than it may have: make it smaller", "response_format"), False
        with self._lock:
            self._idle.append(child)
        if "error" in answer:
            return RequestError(str(answer["error"]), "response_format"), True
        try:
            return xgrammar.CompiledGrammar.deserialize_json(answer["compiled"], child.tokenizer), True
        except (RuntimeError, ValueError) as error:
            return RequestError(f"the compiled grammar cannot be used: {error}", "response_format"), True


class _Child:
    """One compiler process: JSON lines to it and from it, one at a time."""

    def __init__(self, command: list[str], start_seconds: float) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            self.tokenizer = xgrammar.TokenizerInfo.deserialize_json(self._read(start_seconds)["tokenizer"])
        except BaseException:
            self.kill()
            raise

    def ask(self, question: dict[str, str], seconds: float) -> dict[str, Any]:
        """Raises TimeoutError when no answer comes in time, OSError or ValueError when the process died."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        self._process.stdin.flush()
        return self._read(seconds)

    def kill(self) -> None:
        """End it now."""
        self._process.kill()
        self._process.wait()

    def _read(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            line = self._process.stdout.readline(RESULT_BYTES + 1)
        finally:
            timer.cancel()
        if late.is_set():
            raise TimeoutError
        if not line.endswith(b"\n"):
            raise OSError(f"the grammar compiler ended after {len(line)} bytes")
        answer: dict[str, Any] = json.loads(line)
        return answer
