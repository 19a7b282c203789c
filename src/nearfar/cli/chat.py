"""`nearfar chat`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from rich.console import Console

from nearfar.cli.models import Model, artifacts_of
from nearfar.cli.options import (
    DEFAULTS,
    LOAD,
    Cache,
    Debug,
    DeviceName,
    KvBits,
    KvMemory,
    MaxTokens,
    MinP,
    Policy,
    Precision,
    ProgramName,
    Seed,
    Stats,
    Stop,
    System,
    Temperature,
    Threads,
    TopK,
    TopP,
    Trust,
    describe,
    emit,
    load_engine,
    load_snapshot,
    sampling,
)
from nearfar.edge_runtime import Engine
from nearfar.edge_runtime.artifact.options import LoadKeywords
from nearfar.edge_runtime.engine.requests import RequestStats
from nearfar.edge_runtime.openai.parameters import ChatParams
from nearfar.errors import NearfarError, RequestError

HELP = """/reset          forget the conversation
/retry          answer the last question again
/system [TEXT]  show or set the system prompt (starts afresh)
/save FILE      write the conversation as JSON
/stats          speeds of the last answer
/exit           leave; so does Ctrl-D
Ctrl-C stops an answer. A line that ends in \\ goes on in the next."""


def chat(
    model: Model,
    max_tokens: MaxTokens = DEFAULTS.max_tokens,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = DEFAULTS.seed,
    stop: Stop = None,
    system: System = None,
    context_policy: Policy = "error",
    cache: Cache = None,
    stats: Stats = False,
    device: DeviceName = LOAD.device,
    threads: Threads = LOAD.threads,
    kv_memory: KvMemory = None,
    kv_bits: KvBits = LOAD.kv_bits,
    precision: Precision = LOAD.precision,
    program: ProgramName = LOAD.program,
    debug: Debug = LOAD.debug,
    trust: Trust = LOAD.trust,
) -> None:
    """Chat in the terminal. In a pipe, each line of stdin is a question."""
    params = sampling(max_tokens, temperature, top_k, top_p, min_p, seed, stop)
    talk = cast(ChatParams, {**params, "context_policy": context_policy})
    console = Console(highlight=False, soft_wrap=True)
    options: LoadKeywords = {
        "device": device,
        "threads": threads,
        "kv_memory": kv_memory,
        "kv_bits": kv_bits,
        "precision": precision,
        "program": program,
        "debug": debug,
        "trust": trust,
    }
    with load_engine(artifacts_of(model, device), **options) as engine:
        if not engine.asynchronous.codec.has_template:
            raise RequestError("this model has no chat template; use nearfar run --raw")
        if cache is not None:
            load_snapshot(engine, cache)
        Chat(engine, talk, console, system, stats).loop()


@dataclass
class Chat:
    """A conversation in the terminal."""

    engine: Engine
    params: ChatParams
    console: Console
    system: str | None = None
    show_stats: bool = False
    messages: list[dict[str, str]] = field(default_factory=list)
    last: RequestStats | None = None

    @property
    def interactive(self) -> bool:
        """Whether a person sits in front of it."""
        return sys.stdin.isatty() and self.console.is_terminal

    def loop(self) -> None:
        """Read, answer, until the end of the input."""
        if self.interactive:
            import readline  # noqa: F401  (line editing and history for input())

            name, executor = self.engine.manifest.model.name, self.engine.asynchronous.core.executor
            self.console.print(
                f"[bold]{name}[/] on {executor.name} ({executor.program_name}), context "
                f"{self.engine.context:,} tokens. [dim]/help lists the commands[/]"
            )
        while (line := self._read()) is not None:
            if not line.strip():
                continue
            if line.startswith("/"):
                if not self._command(line):
                    return
            else:
                self.messages.append({"role": "user", "content": line})
                self._answer()

    def _read(self) -> str | None:
        """A question, None at the end of the input."""
        lines: list[str] = []
        while True:
            try:
                line = input(("… " if lines else "› ") if self.interactive else "")
            except EOFError:
                return "\n".join(lines) if lines else None
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                self.console.print("\n[dim]Ctrl-D or /exit leaves[/]")
                lines.clear()
                continue
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def _answer(self) -> None:
        """Answer the last question. An interrupted answer stays as far as it got."""
        text, usage = "", None
        system = [{"role": "system", "content": self.system}] if self.system else []
        try:
            with self.engine.chat.completions.create(
                [*system, *self.messages], stream=True, **self.params
            ) as stream:  # fmt: skip
                for chunk in stream:
                    piece = "".join(choice.delta.content or "" for choice in chunk.choices)
                    text += piece
                    emit(piece)
                    self.last = chunk.timings[0] if chunk.timings else self.last
                    usage = chunk.usage or usage
        except KeyboardInterrupt:
            emit(" …")
        except RequestError as error:
            self.messages.pop()
            self.console.print(f"{error} [dim](/reset starts afresh)[/]", style="red", markup=True)
            return
        emit("\n")
        self.messages.append({"role": "assistant", "content": text})
        if left_out := usage and usage.prompt_tokens_details.left_out_messages:
            print(f"note: the oldest {left_out} messages do not fit the context", file=sys.stderr)
        if self.show_stats:
            self._stats("")

    def _command(self, line: str) -> bool:
        """Run a command; False leaves."""
        name, _, argument = line[1:].partition(" ")
        if name in ("exit", "quit"):
            return False
        commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: self.console.print(HELP, markup=False),
            "reset": lambda _: self.messages.clear(),
            "retry": self._retry,
            "system": self._system,
            "save": self._save,
            "stats": self._stats,
        }
        if name not in commands:
            self.console.print(f"no command /{name}; /help lists them", style="red", markup=False)
        else:
            try:
                commands[name](argument.strip())
            except (NearfarError, OSError) as error:
                self.console.print(str(error), style="red", markup=False)
        return True

    def _retry(self, _: str) -> None:
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages:
            raise RequestError("there is no question to answer again")
        self._answer()

    def _system(self, text: str) -> None:
        if text:
            self.system = text
            self.messages.clear()
        else:
            self.console.print(self.system or "no system prompt", markup=False)

    def _save(self, file: str) -> None:
        if not file:
            raise RequestError("/save needs a file name")
        system = [{"role": "system", "content": self.system}] if self.system else []
        path = Path(file).expanduser()
        path.write_text(
            json.dumps([*system, *self.messages], indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        self.console.print(f"saved {len(self.messages)} messages to {path}", markup=False)

    def _stats(self, _: str) -> None:
        line = describe(self.last) if self.last else "no answer yet"
        Console(stderr=True, highlight=False).print(line, style="dim", markup=False, soft_wrap=True)
