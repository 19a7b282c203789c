"""`nearfar cache save` and `nearfar cache load`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import typer

from nearfar.cli.groups import with_groups
from nearfar.cli.messages import read_messages, read_text
from nearfar.cli.models import Kept, kept
from nearfar.cli.options import (
    LOAD,
    ON_DEVICE,
    SAMPLED,
    OnDevice,
    Raw,
    SamplingOptions,
    Trust,
    load_engine,
    load_snapshot,
    report,
)
from nearfar.cli.progress import bytes_bar
from nearfar.cli.run import answer, complete
from nearfar.edge_runtime import Engine, Snapshot
from nearfar.edge_runtime.artifact.budget import show_size
from nearfar.edge_runtime.artifact.options import LoadKeywords
from nearfar.edge_runtime.engine.requests import RequestStats
from nearfar.edge_runtime.openai.parameters import CommonParams
from nearfar.errors import RequestError

cache = typer.Typer(
    help="Snapshots: a prompt's beginning with its keys and values, so that it is computed once and not at "
    "every start.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
)


class SnapshotSource(TypedDict):
    """The arguments of Engine.save_cache that say what a snapshot is made from."""

    messages: NotRequired[Sequence[Mapping[str, Any]]]
    prompt: NotRequired[str]


@cache.command()
@with_groups
def save(
    artifact: Kept,
    output: Annotated[Path, typer.Option("--output", "-o", help="The snapshot to write.")],
    system: Annotated[str | None, typer.Option(help="A system prompt.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="A text file with the system prompt; with --raw, a raw prompt.")
    ] = None,
    messages: Annotated[Path | None, typer.Option(help="A JSON file: a list of messages.")] = None,
    prompt: Annotated[
        str | None, typer.Option(help="A user's prompt; with --raw, the beginning of a raw prompt.")
    ] = None,
    raw: Raw = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is not a snapshot.")] = False,
    on_device: OnDevice = ON_DEVICE,
    trust: Trust = LOAD.trust,
) -> None:
    """Compute the beginning of a prompt and save its keys and values."""
    source = _source(system, file, messages, prompt, raw)
    loading: LoadKeywords = {**on_device.keywords(), "trust": trust}
    with load_engine(kept(artifact), **loading) as engine:
        with bytes_bar(f"saving {output.name}") as progress:
            made = engine.save_cache(output, force=force, progress=progress, **source)
        print(f"{output}: {_facts(made)}", file=sys.stderr)


@cache.command()
@with_groups
def load(
    artifact: Kept,
    file: Annotated[Path, typer.Argument(help="The snapshot.")],
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt behind the snapshot's messages, or behind its text.")
    ] = None,
    sampled: SamplingOptions = SAMPLED,
    on_device: OnDevice = ON_DEVICE,
    trust: Trust = LOAD.trust,
) -> None:
    """Check a snapshot, show its contents, and load it; with a prompt, also answer. Only the answer goes to
    stdout.
    """
    params = sampled.params()
    loading: LoadKeywords = {**on_device.keywords(), "trust": trust}
    with load_engine(kept(artifact), **loading) as engine:
        found = load_snapshot(engine, file)
        print(f"{file}: {_facts(found)}", file=sys.stderr)
        print(_beginning(found), file=sys.stderr)
        if prompt is not None:
            timings = _go_on(engine, found, prompt, params)
            if timings:
                report(engine, timings[0])


def _source(
    system: str | None, file: Path | None, messages: Path | None, prompt: str | None, raw: bool
) -> SnapshotSource:
    given = [
        name
        for name, value in {
            "--system": system,
            "--file": file,
            "--messages": messages,
            "--prompt": prompt,
        }.items()
        if value is not None
    ]
    if len(given) != 1:
        raise RequestError(
            f"give one of --system, --file, --messages and --prompt, not {' and '.join(given) or 'none'}"
        )
    if raw and given[0] in ("--system", "--messages"):
        raise RequestError(f"{given[0]} needs the chat template, which --raw leaves out", given[0][2:])
    text = read_text(file) if file is not None else system if system is not None else prompt
    if messages is not None:
        return {"messages": read_messages(messages)}
    assert text is not None
    if raw:
        return {"prompt": text}
    return {"messages": [{"role": "user" if prompt is not None else "system", "content": text}]}


def _go_on(
    engine: Engine, snapshot: Snapshot, prompt: str, params: CommonParams
) -> list[RequestStats] | None:
    if snapshot.messages is not None:
        *before, last = snapshot.messages
        if last["role"] == "user":  # the saved text is the beginning of the question
            return answer(engine, [*before, {**last, "content": last["content"] + prompt}], params)
        return answer(engine, [*snapshot.messages, {"role": "user", "content": prompt}], params)
    if snapshot.prompt is not None:
        return complete(engine, snapshot.prompt + prompt, params)
    raise RequestError(f"{snapshot.path} was saved from token ids, so a text cannot continue it", "prompt")


def _facts(snapshot: Snapshot) -> str:
    kv = f"{snapshot.kv_bits}-bit" if snapshot.kv_bits else snapshot.kv_dtype
    return (
        f"{snapshot.tokens:,} tokens, {show_size(snapshot.bytes)}, {kv} keys and values of {snapshot.origin}"
    )


def _beginning(snapshot: Snapshot) -> str:
    """The text that the snapshot was made from, shortened to a few lines."""
    if snapshot.messages is not None:
        return "\n".join(
            f"  {message['role']}: {_short(message['content'])}" for message in snapshot.messages
        )
    return f"  text: {_short(snapshot.prompt)}" if snapshot.prompt is not None else "  token ids"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 100 else f"{line[:99]}…"
