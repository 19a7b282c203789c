"""The state of a conversation in the terminal, and how a question is answered in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from nearfar.cli.drawing import is_terminal
from nearfar.cli.options import describe
from nearfar.cli.session.screen import Answered, Screen, emit
from nearfar.edge_runtime import Engine
from nearfar.edge_runtime.engine.requests import RequestStats
from nearfar.edge_runtime.openai.parameters import ChatParams
from nearfar.edge_runtime.openai.records import Usage
from nearfar.errors import ContextError, RequestError
from nearfar.format.sampling import SamplingDefaults

Message = dict[str, Any]
TRUNCATE = "truncate-oldest"
WAYS = f"/reset starts afresh, and /set context_policy {TRUNCATE} lets it forget its oldest turns"
"""Advice for a conversation that fills the context."""


@dataclass
class Session:
    """A conversation with a model. `console` shows the output of commands, `errors` failures and figures.

    `stoppable`: Ctrl-C stops only the answer; otherwise it ends the conversation.
    """

    engine: Engine
    params: ChatParams
    console: Console
    errors: Console
    system: str | None = None
    markdown: bool = False
    stats: bool = False
    stoppable: bool = False
    messages: list[Message] = field(default_factory=list)
    last: RequestStats | None = None
    failed: bool = False
    """Whether any question or command has failed."""

    @property
    def defaults(self) -> SamplingDefaults:
        """The model's sampling defaults."""
        return self.engine.manifest.sampling

    @property
    def conversation(self) -> list[Message]:
        """All messages, the system prompt first."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    @property
    def unanswered(self) -> bool:
        """Whether the last message is a question without an answer."""
        return bool(self.messages) and self.messages[-1]["role"] == "user"

    def ask(self, question: str) -> None:
        """Answer a question; a refused question is not added to the conversation."""
        before = [*self.messages]
        # Templates want alternating turns; after a device failed, or /load, the last one may be a question.
        if self.unanswered:
            self.messages.pop()
            self.note("the question before this one has no answer, and is left out")
        self.messages.append({"role": "user", "content": question})
        self.answer(before)

    def retry(self) -> None:
        """Answer the last question again; the old answer stays where the request is refused."""
        before = [*self.messages]
        while self.messages and self.messages[-1]["role"] != "user":
            self.messages.pop()
        if not self.messages:
            self.messages = before
            raise RequestError("there is no question to answer again")
        self.answer(before)

    def answer(self, before: list[Message]) -> None:
        """Answer the conversation; a stopped answer is kept as far as it got. After a RequestError the
        conversation is set back to `before`.
        """
        made, stopped = Answered(), False
        try:
            with (
                Screen(self.markdown) as screen,
                self.engine.chat.completions.create(self.conversation, stream=True, **self.params) as stream,
            ):
                made.show(stream, screen)
        except KeyboardInterrupt:
            if not self.stoppable:
                raise
            stopped = True
        except RequestError as error:
            self.messages = before
            raise RequestError(self._refusal(error), error.param) from error
        if not is_terminal():
            emit("\n")  # separates two answers
        self.messages.append({"role": "assistant", "content": made.text})
        self.last = made.timings[0] if made.timings else None
        self._after(made, stopped)

    def tell(self, text: str) -> None:
        """Print something that is not part of an answer."""
        self.console.print(text, markup=False)

    def note(self, text: str) -> None:
        """Print a note that the user may want to know."""
        self.errors.print(f"note: {text}", style="dim", markup=False)

    def fail(self, error: Exception) -> None:
        """Print an error, and remember that there was one."""
        self.failed = True
        self.errors.print(f"error: {error}", style="red", markup=False)

    def show_stats(self) -> None:
        """The figures of the last answer."""
        self.errors.print(
            describe(self.last) if self.last else "no figures: no whole answer yet", style="dim"
        )

    def _refusal(self, error: RequestError) -> str:
        """The message for a refused question; one that is too long for the context has its own, since earlier
        messages cannot be shortened.
        """
        if not isinstance(error, ContextError):
            return f"{error} (/reset starts afresh)"
        if not self.messages or self.params.get("context_policy") == TRUNCATE:
            return f"the question is too long for the context of {self.engine.context:,} tokens: shorten it"
        return f"the conversation no longer fits the context of {self.engine.context:,} tokens: {WAYS}"

    def _cut(self, usage: Usage | None) -> str | None:
        """The reason why an answer was cut, if it was. In a pipe max_tokens is not mentioned: a script knows
        its own limit.
        """
        if usage is not None and usage.total_tokens < self.engine.context:
            how = "/set max_tokens default lets answers go on to their end"
            return f"cut after {usage.completion_tokens} tokens: {how}" if self.stoppable else None
        return f"cut: the context of {self.engine.context:,} tokens is full. {WAYS}"

    def _after(self, made: Answered, stopped: bool) -> None:
        """Print what belongs below an answer: why it was cut, and its figures."""
        if stopped:
            self.errors.print("stopped; /retry asks again", style="dim")
        if made.cut and (told := self._cut(made.usage)):
            self.note(told)
        if left_out := made.usage and made.usage.prompt_tokens_details.left_out_messages:
            self.note(f"the oldest {left_out} messages do not fit the context")
        if self.stats and made.timings:
            self.show_stats()


Handler = Callable[[Session, str], None]
