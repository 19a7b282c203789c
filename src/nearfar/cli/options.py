"""Options that several commands share, one by one and in groups.

Defaults are those of SamplingParams and LoadOptions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Unpack, cast

import typer
from rich.console import Console

from nearfar.cli.progress import Shown, bytes_bar
from nearfar.edge_runtime import Engine, SamplingParams, Snapshot
from nearfar.edge_runtime.artifact.options import LoadKeywords, LoadOptions
from nearfar.edge_runtime.devices import AUTO, device_choices, device_names, kv_bits_choices
from nearfar.edge_runtime.engine.requests import RequestStats
from nearfar.edge_runtime.grammars.schema import narrowed
from nearfar.edge_runtime.openai.parameters import (
    ChatParams,
    CommonParams,
    CompletionParams,
    asked_grammar,
    chat_sampling,
    completion_sampling,
)
from nearfar.errors import RequestError
from nearfar.strict_json import loads

DEFAULTS = SamplingParams()
LOAD = LoadOptions()
MODELS = "Default: the model's (nearfar inspect shows it), else "

MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", help="Longest answer, in tokens. Default: until the context is full."),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        help=f"0 takes the likeliest token; higher is more varied. {MODELS}{DEFAULTS.temperature:g}.",
        show_default=False,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(help=f"Only the K likeliest tokens (0: all). {MODELS}{DEFAULTS.top_k}.", show_default=False),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Only the likeliest tokens that make up this probability, in (0, 1]. "
        f"{MODELS}{DEFAULTS.top_p:g}.",
        show_default=False,
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help=f"Only tokens at least this likely, relative to the likeliest. {MODELS}{DEFAULTS.min_p:g}.",
        show_default=False,
    ),
]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text, on every device.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the answer before this text; may be repeated.")]
Policy = Annotated[
    Literal["error", "truncate-oldest"],
    typer.Option(
        help="error: reject a conversation that does not fit the context; truncate-oldest: leave out its "
        "oldest turns.",
    ),
]
System = Annotated[str | None, typer.Option(help="System prompt.")]
TemplateVars = Annotated[
    list[str] | None,
    typer.Option(
        "--template-var",
        metavar="NAME=VALUE",
        help="A variable for the model's chat template, such as enable_thinking=false. The value is JSON or "
        "text; may be repeated.",
    ),
]
DeviceName = Annotated[
    str,
    typer.Option(
        "--device",
        help=f"{device_choices()}.",
        autocompletion=lambda incomplete: [
            name for name in (AUTO, *device_names()) if name.startswith(incomplete)
        ],
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        help="f16 or f32, if the artifact has both. Default: the best one that the device supports."
    ),
]
ProgramName = Annotated[
    str | None,
    typer.Option("--program", help="Name of the artifact's program to run (nearfar inspect lists them)."),
]
Debug = Annotated[
    bool,
    typer.Option(
        "--debug",
        help="Check every call with Vulkan's validation layer. This is slow; messages go to stderr.",
    ),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Run the native code of an artifact that was not built here, now and from now on."
    ),
]
Threads = Annotated[
    int | None, typer.Option(help="CPU threads. Default: one for each core, within the container's quota.")
]
KvMemory = Annotated[
    str | None, typer.Option(help="Memory for the KV cache, such as 512MB. Default: half of the free memory.")
]
ContextLength = Annotated[
    int | None,
    typer.Option(
        "--context",
        min=1,
        help="The most tokens of prompt and answer. Default: as many as the model and the memory allow. "
        "A model with LongRoPE takes its short factors if this is at most its original context length.",
    ),
]
KvBits = Annotated[
    int | None,
    typer.Option(help=f"Bits of a value in the KV cache: {kv_bits_choices()}. Default: floats."),
]
Cache = Annotated[
    Path | None,
    typer.Option(
        help="A snapshot (nearfar cache save), so that the beginning of the prompt is not computed again."
    ),
]
JsonObject = Annotated[
    bool, typer.Option("--json-object", help="The answer is a JSON object, with any fields.")
]
SchemaFile = Annotated[
    Path | None,
    typer.Option(
        "--schema", exists=True, dir_okay=False, help="A file with the JSON schema that the answer matches."
    ),
]
Raw = Annotated[
    bool,
    typer.Option(
        "--raw", help="Continue the prompt as it is, without a chat template; an empty prompt is BOS."
    ),
]
Stats = Annotated[bool, typer.Option("--stats", help="Print token counts and speeds to stderr at the end.")]


@dataclass(frozen=True)
class SamplingOptions:
    """Options for sampling the tokens of an answer, and for its end; None: the model's default."""

    max_tokens: MaxTokens = DEFAULTS.max_tokens
    temperature: Temperature = None
    top_k: TopK = None
    top_p: TopP = None
    min_p: MinP = None
    seed: Seed = DEFAULTS.seed
    stop: Stop = None

    def params(self) -> CommonParams:
        """The request parameters of these options."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given |= {"stop": list(self.stop or ()), "stream_options": {"include_usage": True}}
        return cast(CommonParams, given)


@dataclass(frozen=True)
class OnDevice:
    """Options for the device that a model is loaded on, and for the memory that it may use."""

    device: DeviceName = LOAD.device
    threads: Threads = LOAD.threads
    kv_memory: KvMemory = None
    context: ContextLength = LOAD.context
    kv_bits: KvBits = LOAD.kv_bits

    def keywords(self) -> LoadKeywords:
        """The options as LoadOptions takes them."""
        return cast(LoadKeywords, {field.name: getattr(self, field.name) for field in fields(self)})


@dataclass(frozen=True)
class LoadingOptions(OnDevice):
    """All options for loading a model to answer."""

    precision: Precision = LOAD.precision
    program: ProgramName = LOAD.program
    debug: Debug = LOAD.debug
    trust: Trust = LOAD.trust


SAMPLED, ON_DEVICE, LOADED = SamplingOptions(), OnDevice(), LoadingOptions()


def check_asked(params: CommonParams, raw: bool, load: LoadKeywords) -> None:
    """Raise RequestError for parameters that no model accepts, before one is downloaded, built or loaded."""
    LoadOptions(**load)
    if raw:
        completion_sampling(cast(CompletionParams, params))
    else:
        chat_sampling(cast(ChatParams, params))
    grammar = asked_grammar(params)
    if grammar is not None and grammar.kind == "json_schema":
        narrowed(loads(grammar.text), strict=True, param="response_format")


def template_variables(given: Sequence[str] | None) -> ChatParams:
    """The request parameter of `--template-var`; empty without one."""
    variables: dict[str, Any] = {}
    for one in given or ():
        name, equals, value = one.partition("=")
        if not equals:
            raise RequestError(f"--template-var {one}: give NAME=VALUE, as in enable_thinking=false")
        try:
            variables[name] = loads(value)
        except ValueError:
            variables[name] = value
    return {"chat_template_kwargs": variables} if variables else {}


def response_format(json_object: bool, schema: Path | None) -> CommonParams:
    """The `response_format` of --json-object and --schema; empty without either."""
    if schema is None:
        return CommonParams(response_format={"type": "json_object"}) if json_object else CommonParams()
    if json_object:
        raise RequestError("give --json-object (any object) or --schema, not both", "response_format")
    try:
        read = loads(schema.read_bytes())
    except ValueError as error:
        raise RequestError(f"{schema} is not JSON: {error}", "response_format") from error
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": read}}
    return CommonParams(response_format=form)


def load_engine(artifact: Path, **options: Unpack[LoadKeywords]) -> Engine:
    """Load an engine and show what is waited for, while it loads and later."""
    shown = Shown(Console(stderr=True))
    try:
        return Engine.load(artifact, progress=shown, **options)
    except BaseException:
        shown.end()
        raise


def load_snapshot(engine: Engine, file: Path) -> Snapshot:
    """Put a snapshot into the engine's cache, showing progress."""
    with bytes_bar(f"loading {file.name}") as progress:
        return engine.load_cache(file, progress=progress)


def describe(stats: RequestStats) -> str:
    """The figures of one answer in a line."""
    cached = f" ({stats.cached_tokens} cached)" if stats.cached_tokens else ""
    return (
        f"prompt {stats.prompt_tokens} tokens{cached}, first token after {stats.ttft:.3f} s, "
        f"prefill {stats.prefill_rate:.1f} tokens/s; answer {stats.completion_tokens} tokens, "
        f"decode {stats.decode_rate:.1f} tokens/s"
    )


def report(engine: Engine, stats: RequestStats) -> None:
    """Write the figures of one answer to stderr."""
    core = engine.asynchronous.core
    chosen = f"{core.executor.program_name}, {core.choice}" if core.choice else core.executor.program_name
    if core.largest_step < core.largest_bucket:
        chosen += f", steps of at most {core.largest_step} rows for lack of memory"
    print(f"{core.executor.name} ({chosen}): {describe(stats)}", file=sys.stderr)
