"""`nearfar run`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Annotated, Any, cast

import typer

from nearfar.cli.as_json import JsonAnswer
from nearfar.cli.drawing import while_read
from nearfar.cli.groups import with_groups
from nearfar.cli.models import Adapter, Model, artifacts_of
from nearfar.cli.options import (
    LOADED,
    SAMPLED,
    Cache,
    JsonObject,
    LoadingOptions,
    Raw,
    SamplingOptions,
    SchemaFile,
    Stats,
    System,
    TemplateVars,
    check_asked,
    load_engine,
    load_snapshot,
    report,
    response_format,
    template_variables,
)
from nearfar.cli.session.screen import Answered, Screen, emit
from nearfar.edge_runtime import Engine
from nearfar.edge_runtime.artifact.options import LoadKeywords
from nearfar.edge_runtime.engine.requests import RequestStats
from nearfar.edge_runtime.openai.parameters import CommonParams
from nearfar.errors import RequestError

Prompt = Annotated[
    str | None, typer.Argument(help="The prompt; - reads it from stdin, which is the default in a pipe.")
]


@with_groups
def run(
    model: Model,
    prompt: Prompt = None,
    sampled: SamplingOptions = SAMPLED,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print OpenAI's response object instead of the text, usage included."),
    ] = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="With --json: print one chunk per line while the answer comes.")
    ] = False,
    json_object: JsonObject = False,
    schema: SchemaFile = None,
    system: System = None,
    template_var: TemplateVars = None,
    raw: Raw = False,
    cache: Cache = None,
    stats: Stats = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Render the answer's markdown in a terminal.")
    ] = False,
    adapter: Adapter = None,
    loaded: LoadingOptions = LOADED,
) -> None:
    """Answer one prompt. Only the answer goes to stdout, piece by piece: into a pipe exactly its text, on a
    terminal with a line break at its end.

    Exit codes: 0 an answer; 1 an error, which stderr tells; 2 options that do not exist; 130 Ctrl-C.
    """
    if stream and not json:
        raise RequestError("--stream is for --json: without --json, text is always streamed", "stream")
    if markdown and (json or raw):
        raise RequestError("--markdown is for text: leave out --json and --raw", "markdown")
    text = _prompt(prompt, raw)
    params = sampled.params()
    params.update(response_format(json_object, schema))
    if raw and system is not None:
        raise RequestError("--system needs the chat template, which --raw leaves out", "system")
    if raw and template_var:
        raise RequestError("--template-var is for the chat template, which --raw leaves out")
    params = cast(CommonParams, {**params, **template_variables(template_var)})
    # The prompt is known, and needs fewer kernels than an arbitrary one.
    options: LoadKeywords = {**loaded.keywords(), "ready": "decode"}
    check_asked(params, raw, options)
    with load_engine(artifacts_of(model, loaded.device, chats=not raw, adapter=adapter), **options) as engine:
        if cache is not None:
            load_snapshot(engine, cache)
        timings = None
        with while_read():
            if json:
                timings = print_json(engine, text if raw else conversation(text, system), params, stream)
            elif raw:
                timings = complete(engine, text, params)
            else:
                timings = answer(engine, conversation(text, system), params, markdown)
        if stats and timings:
            report(engine, timings[0])
        if cache is not None and timings and not timings[0].cached_tokens:
            print(
                f"note: {cache} saved no time: the prompt does not begin as the snapshot does",
                file=sys.stderr,
            )


def complete(engine: Engine, prompt: str, params: CommonParams) -> list[RequestStats] | None:
    """Print the continuation of a raw prompt; gives its statistics."""
    timings = None
    with Screen() as screen, engine.completions.create(prompt, stream=True, **params) as stream:
        for chunk in stream:
            screen.write("".join(choice.text for choice in chunk.choices))
            timings = chunk.timings or timings
    return timings


def print_json(
    engine: Engine, prompt: str | list[dict[str, str]], params: CommonParams, stream: bool
) -> list[RequestStats] | None:
    """Print the answer to a conversation, or the continuation of a raw prompt, as JSON: whole, or a chunk a
    line. Gives the statistics.
    """
    with (
        engine.completions.create(prompt, stream=True, **params)
        if isinstance(prompt, str)
        else engine.chat.completions.create(prompt, stream=True, **params)
    ) as chunks:
        made = JsonAnswer(chunks, chat=not isinstance(prompt, str))
        for line in made.lines() if stream else (made.whole(),):
            emit(line)
    return made.timings


def conversation(prompt: str, system: str | None) -> list[dict[str, str]]:
    """A question and a system prompt as messages."""
    return [
        *([{"role": "system", "content": system}] if system is not None else []),
        {"role": "user", "content": prompt},
    ]


def answer(
    engine: Engine, messages: Seq[Mapping[str, Any]], params: CommonParams, markdown: bool = False
) -> list[RequestStats] | None:
    """Print the answer to a conversation; gives its statistics."""
    made = Answered()
    with (
        Screen(markdown) as screen,
        engine.chat.completions.create(messages, stream=True, **params) as stream,
    ):
        made.show(stream, screen)
    return made.timings


def _prompt(given: str | None, raw: bool) -> str:
    """The given prompt, or the text of stdin in its place."""
    text = _given(given)
    if not raw and not text.strip():
        raise RequestError(
            'the prompt is empty: give a question, as in nearfar run MODEL "Why is the sky blue?", or a text '
            "on stdin; with --raw, an empty prompt lets the model begin by itself",
            "prompt",
        )
    return text


def _given(given: str | None) -> str:
    if given is not None and given != "-":
        return given
    if given is None and sys.stdin.isatty():
        raise RequestError(
            'there is no prompt: give one, as in nearfar run MODEL "Why is the sky blue?", or - to type it '
            "on stdin; nearfar chat MODEL asks for questions",
            "prompt",
        )
    data = sys.stdin.buffer.read()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the prompt on stdin is not UTF-8: byte {error.start} is {data[error.start]:#04x}"
        ) from error
