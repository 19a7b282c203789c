"""`nearfar run`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Annotated, Any

import typer

from nearfar.cli.models import Model, artifacts_of
from nearfar.cli.options import (
    DEFAULTS,
    LOAD,
    Cache,
    Debug,
    DeviceName,
    Json,
    KvBits,
    KvMemory,
    MaxTokens,
    MinP,
    Precision,
    ProgramName,
    Raw,
    SchemaFile,
    Seed,
    Stats,
    Stop,
    System,
    Temperature,
    Threads,
    TopK,
    TopP,
    Trust,
    emit,
    load_engine,
    load_snapshot,
    report,
    response_format,
    sampling,
)
from nearfar.edge_runtime import Engine
from nearfar.edge_runtime.artifact.options import LoadKeywords
from nearfar.edge_runtime.engine.requests import RequestStats
from nearfar.edge_runtime.openai.parameters import CommonParams
from nearfar.errors import RequestError

Prompt = Annotated[
    str | None, typer.Argument(help="The prompt; - reads it from stdin, as does leaving it out in a pipe.")
]


def run(
    model: Model,
    prompt: Prompt = None,
    max_tokens: MaxTokens = DEFAULTS.max_tokens,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = DEFAULTS.seed,
    stop: Stop = None,
    json: Json = False,
    schema: SchemaFile = None,
    system: System = None,
    raw: Raw = False,
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
    """Answer one prompt. Only the answer goes to stdout, piece by piece; with --raw exactly the sampled
    text.
    """
    text = _prompt(prompt)
    params = sampling(max_tokens, temperature, top_k, top_p, min_p, seed, stop)
    params.update(response_format(json, schema))
    if raw and system is not None:
        raise RequestError("--system needs the chat template, which --raw leaves out", "system")
    options: LoadKeywords = {
        "device": device,
        "threads": threads,
        "kv_memory": kv_memory,
        "kv_bits": kv_bits,
        "precision": precision,
        "program": program,
        "debug": debug,
        "trust": trust,
        "ready": "decode",  # the prompt is known: it asks for fewer kernels than any prompt may
    }
    with load_engine(artifacts_of(model, device), **options) as engine:
        if cache is not None:
            load_snapshot(engine, cache)
        try:
            timings = (
                complete(engine, text, params) if raw else answer(engine, conversation(text, system), params)
            )
        except BrokenPipeError:  # the reader has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return
        if stats and timings:
            report(engine, timings[0])
        if cache is not None and timings and not timings[0].cached_tokens:
            print(f"note: {cache} saved nothing: the prompt does not begin as it does", file=sys.stderr)


def complete(engine: Engine, prompt: str | Seq[int], params: CommonParams) -> list[RequestStats] | None:
    """Print the continuation of a raw prompt; gives what it cost."""
    timings = None
    with engine.completions.create(prompt, stream=True, **params) as stream:
        for chunk in stream:
            emit("".join(choice.text for choice in chunk.choices))
            timings = chunk.timings or timings
    return timings


def conversation(prompt: str, system: str | None) -> list[dict[str, str]]:
    """A question as messages."""
    return [
        *([{"role": "system", "content": system}] if system is not None else []),
        {"role": "user", "content": prompt},
    ]


def answer(
    engine: Engine, messages: Seq[Mapping[str, Any]], params: CommonParams
) -> list[RequestStats] | None:
    """Print the answer to a conversation; gives what it cost."""
    timings = None
    with engine.chat.completions.create(messages, stream=True, **params) as stream:
        for chunk in stream:
            emit("".join(choice.delta.content or "" for choice in chunk.choices))
            timings = chunk.timings or timings
    emit("\n")
    return timings


def _prompt(given: str | None) -> str:
    if given is not None and given != "-":
        return given
    if given is None and sys.stdin.isatty():
        raise typer.BadParameter('give a prompt, or - to read it from stdin ("" with --raw starts from BOS)')
    data = sys.stdin.buffer.read()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the prompt on stdin is not UTF-8: byte {error.start} is {data[error.start]:#04x}"
        ) from error
