"""`nearfar pull`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from nearfar.build.options import Quality
from nearfar.cli.models import Adapter, building
from nearfar.cli.progress import bytes_bar, telling
from nearfar.edge_runtime.artifact.budget import show_size
from nearfar.edge_runtime.devices import AUTO
from nearfar.store.entries import Store
from nearfar.store.known import KNOWN
from nearfar.store.making import elsewhere, for_device, made
from nearfar.store.naming import GivenOptions, wanted_of


def pull(
    model: Annotated[
        str,
        typer.Argument(
            help="A hub id (owner/name, owner/name-GGUF:Q4_K_M), a checkpoint of this machine, the URL "
            "of artifacts (https://host/path/, fetched as they are), or one of "
            f"{', '.join(KNOWN)}.",
            show_default=False,
        ),
    ],
    quant: Annotated[
        str | None,
        typer.Option(
            help="Quantization of the weights: q2 to q8 or none. Default: that of nearfar build, or of the "
            "short name."
        ),
    ] = None,
    requantize: Annotated[
        str | None,
        typer.Option(
            help="Quantize a quantized checkpoint again, instead of keeping its codes: q2 to q8 or none.",
            show_default=False,
        ),
    ] = None,
    quality: Annotated[
        Quality | None,
        typer.Option(
            help="How long to look for good codes: good and best take minutes, and answer better at the same "
            "size (docs/quality.md). Default: that of the stored artifact, else fast.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="Targets to build for, separated by commas. Default: the best one of this machine.",
            show_default=False,
        ),
    ] = None,
    adapter: Adapter = None,
) -> None:
    """Get a model and build it into the store, where `nearfar run`, `chat`, `web` and `serve` find it by its
    name. An artifact that exists is not built again; an interrupted download continues where it ended.
    """
    console, store = Console(stderr=True), Store()
    named = [name.strip() for part in target or () for name in part.split(",") if name.strip()]
    runners = [elsewhere(name) for name in dict.fromkeys(named)]
    wanted = wanted_of(model, store, GivenOptions(quant, quality, requantize, adapter))
    for runner in runners or [for_device(AUTO)]:
        entry = made(store, wanted, runner, building(console), telling(console), bytes_bar)
    there = ", ".join(entry.targets)
    name = entry.wanted.name
    telling(console)(f"{name}: {there}, {show_size(entry.bytes)}. Next: nearfar run {name}")
