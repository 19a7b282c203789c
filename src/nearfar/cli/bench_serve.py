"""`nearfar bench serve`: puts load on a server and measures how it copes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from nearfar.errors import NearfarError, RequestError
from nearfar.fallback_server.bench.bench import run
from nearfar.fallback_server.bench.options import Api, BenchOptions, Mode, Slo, Workload
from nearfar.fallback_server.bench.page import page
from nearfar.fallback_server.bench.table import LevelBars, view

DEFAULTS, WORK, SLO = BenchOptions(), Workload(), Slo()


def _option(panel: str, name: str, text: str, **more: Any) -> typer.models.OptionInfo:
    made: typer.models.OptionInfo = typer.Option(name, help=text, rich_help_panel=panel, **more)
    return made


def serve(
    url: Annotated[
        str, typer.Argument(help="A server with OpenAI's interface, such as http://127.0.0.1:8000.")
    ],
    mode: Annotated[
        str, _option("Load", "--mode", "The kind of load: closed, open or both.")
    ] = DEFAULTS.mode,
    concurrency: Annotated[
        str, _option("Load", "--concurrency", "Requests at once: one closed loop for each number.")
    ] = ",".join(map(str, DEFAULTS.concurrency)),
    rate: Annotated[
        str,
        _option(
            "Load",
            "--rate",
            "Mean requests a second: one open loop for each number. Default: the trace's rate; 1 without a "
            "trace.",
        ),
    ] = ",".join(map(str, DEFAULTS.rates)),
    requests: Annotated[
        int | None,
        _option(
            "Load", "--requests", "Requests of a level. Default: 4 x concurrency, at least 32; open: 256."
        ),
    ] = DEFAULTS.requests,
    level_seconds: Annotated[
        float, _option("Load", "--level-seconds", "Seconds after which no more requests of a level begin.")
    ] = DEFAULTS.level_seconds,
    timeout: Annotated[
        float, _option("Load", "--timeout", "Seconds without a byte after which a request fails.")
    ] = DEFAULTS.timeout,
    trace: Annotated[
        Path | None,
        _option(
            "Requests",
            "--trace",
            "Lengths and arrivals of real traffic: Azure's CSV or Mooncake's JSON lines.",
        ),
    ] = WORK.trace,
    scale: Annotated[
        float, _option("Requests", "--scale", "A factor for the lengths of the trace.")
    ] = WORK.scale,
    prompt_tokens: Annotated[
        int, _option("Requests", "--prompt-tokens", "Mean length of prompts, without a trace.")
    ] = WORK.prompt_tokens,
    output_tokens: Annotated[
        int, _option("Requests", "--output-tokens", "Mean length of answers, without a trace.")
    ] = WORK.output_tokens,
    spread: Annotated[
        float, _option("Requests", "--spread", "Spread of the lengths, without a trace; 0: all equal.")
    ] = WORK.spread,
    shared_prefix: Annotated[
        int, _option("Requests", "--shared-prefix", "Additional tokens with which all prompts begin.")
    ] = WORK.shared_prefix,
    max_prompt: Annotated[
        int | None,
        _option("Requests", "--max-prompt", "Longest prompt. Default: three quarters of the context."),
    ] = WORK.max_prompt,
    max_output: Annotated[
        int | None, _option("Requests", "--max-output", "Longest answer.")
    ] = WORK.max_output,
    seed: Annotated[int, _option("Requests", "--seed", "The same seed sends the same requests.")] = WORK.seed,
    model: Annotated[
        str | None,
        _option("Server", "--model", "The model to measure. Default: the first one that the server lists."),
    ] = DEFAULTS.model,
    api: Annotated[str, _option("Server", "--api", "The API to call: completions or chat.")] = DEFAULTS.api,
    key: Annotated[
        str | None, _option("Server", "--key", "API key.", envvar="NEARFAR_API_KEY")
    ] = DEFAULTS.key,
    temperature: Annotated[
        float, _option("Server", "--temperature", "Temperature of the answers.")
    ] = DEFAULTS.temperature,
    ignore_eos: Annotated[
        bool, _option("Server", "--ignore-eos/--no-ignore-eos", "Ask for answers of full length.")
    ] = DEFAULTS.ignore_eos,
    slo_ttft: Annotated[
        float, _option("Figures", "--slo-ttft", "Seconds to the first token, for goodput.")
    ] = SLO.ttft,
    slo_tpot: Annotated[
        float, _option("Figures", "--slo-tpot", "Seconds between tokens, for goodput.")
    ] = SLO.tpot,
    as_json: Annotated[Path | None, _option("Figures", "--json", "Write the figures to this file.")] = None,
    as_html: Annotated[
        Path | None, _option("Figures", "--html", "Write a page with plots to this file.")
    ] = None,
) -> None:
    """Put load on a server and measure TTFT, TPOT, throughput and goodput. Ctrl-C ends the run and shows the
    figures so far.

    Prompts are made of words whose cost in the server's own tokens is measured first. The server must bear
    the load alone: run this on another machine, or keep in mind that it takes some of this one.
    """
    work = Workload(
        trace, scale, prompt_tokens, output_tokens, spread, shared_prefix, max_prompt, max_output, seed
    )
    # BenchOptions refuses other modes and interfaces.
    options = BenchOptions(
        cast(Mode, mode),
        numbers(concurrency, int, "concurrency"),
        numbers(rate, float, "rate"),
        requests,
        level_seconds,
        timeout,
        cast(Api, api),
        model,
        key,
        temperature,
        ignore_eos,
        Slo(slo_ttft, slo_tpot),
        work,
    )
    for path in (as_json, as_html):
        if path is not None and not path.parent.is_dir():
            raise RequestError(f"{path.parent} is not a folder", "json")
    errors = Console(stderr=True)
    bars = LevelBars(errors)
    with bars.progress:
        report = run(url, options, bars)
    Console().print(view(report))
    if as_json is not None:
        as_json.write_text(json.dumps(report.record(), indent=1) + "\n", encoding="utf-8")
    if as_html is not None:
        as_html.write_text(page(report), encoding="utf-8")
    if report.interrupted:
        raise typer.Exit(130)
    if not any(level.ok for level in report.levels):
        raise NearfarError("no request succeeded: see the errors above")


def numbers(text: str, kind: type[Any], name: str) -> tuple[Any, ...]:
    """Parse numbers separated by commas."""
    try:
        return tuple(kind(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise RequestError(
            f"--{name} must be numbers with commas between them, not {text!r}", name
        ) from error
