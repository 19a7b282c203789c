"""`nearfar chat`."""

from __future__ import annotations

import sys
from typing import Annotated, cast

import typer
from rich.console import Console

from nearfar.cli.drawing import is_terminal, while_read
from nearfar.cli.groups import with_groups
from nearfar.cli.models import Adapter, Model, artifacts_of
from nearfar.cli.options import (
    LOADED,
    SAMPLED,
    Cache,
    LoadingOptions,
    Policy,
    SamplingOptions,
    Stats,
    System,
    TemplateVars,
    check_asked,
    load_engine,
    load_snapshot,
    template_variables,
)
from nearfar.cli.session import commands
from nearfar.cli.session.input import Lines, QuestionReader
from nearfar.cli.session.session import Session
from nearfar.edge_runtime.openai.parameters import ChatParams, CommonParams
from nearfar.errors import RequestError
from nearfar.folders import data_folder

HISTORY = "chat-history"
"""The file of typed questions, in the user's data folder."""


@with_groups
def chat(
    model: Model,
    sampled: SamplingOptions = SAMPLED,
    system: System = None,
    template_var: TemplateVars = None,
    context_policy: Policy = "error",
    cache: Cache = None,
    stats: Stats = False,
    markdown: Annotated[
        bool, typer.Option(help="Render the markdown of answers, where the terminal can redraw.")
    ] = True,
    history: Annotated[
        bool, typer.Option(help="Keep what is typed for the next sessions, in a file of this user's data.")
    ] = True,
    adapter: Adapter = None,
    loaded: LoadingOptions = LOADED,
) -> None:
    """Chat in the terminal; /help there lists the commands. In a pipe, each line of stdin is a question or a
    command, and the exit code is 1 if one of them failed.
    """
    params = {
        **sampled.params(),
        **template_variables(template_var),
    }
    options = loaded.keywords()
    check_asked(cast(CommonParams, params), False, options)
    with load_engine(artifacts_of(model, loaded.device, chats=True, adapter=adapter), **options) as engine:
        if not engine.asynchronous.codec.has_template:
            raise RequestError("this model has no chat template; use nearfar run --raw")
        if cache is not None:
            load_snapshot(engine, cache)
        session = Session(
            engine,
            cast(ChatParams, {**params, "context_policy": context_policy}),
            _console(stderr=False),
            _console(stderr=True),
            system,
            markdown,
            stats,
            stoppable=person(),
        )
        with while_read():
            converse(session, reader(history))
    if session.failed and not session.stoppable:
        raise typer.Exit(1)


def _console(stderr: bool) -> Console:
    """A console that wraps lines between words on a terminal, and not at all in a pipe."""
    console = Console(stderr=stderr, highlight=False)
    console.soft_wrap = not console.is_terminal
    return console


def person() -> bool:
    """Whether stdin and stdout are a terminal with a person."""
    return sys.stdin.isatty() and is_terminal()


def reader(history: bool) -> QuestionReader:
    """The reader of questions: the line editor on a terminal, else lines of stdin."""
    if not person():
        return Lines()
    from nearfar.cli.session.editor import Editor

    return Editor(data_folder() / HISTORY if history else None)


def converse(session: Session, questions: QuestionReader) -> None:
    """Read and answer questions until the end of the input."""
    if session.stoppable:
        engine, executor = session.engine, session.engine.asynchronous.core.executor
        session.tell(
            f"{engine.manifest.model.name} on {executor.name} ({executor.program_name}), "
            f"context {engine.context:,} tokens. /help lists the commands"
        )
    while True:
        try:
            if (text := questions.read()) is None:
                return
            commands.run(session, text)
        except KeyboardInterrupt:
            if not session.stoppable:
                raise
            session.tell("Ctrl-D or /exit leaves")
        except commands.Leave:
            return
