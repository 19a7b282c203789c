"""`nearfar bench`: measure. One file a sub-command, imported when it is used."""

from __future__ import annotations

from typing import ClassVar

import typer

from nearfar.cli import LazyGroup


class Benches(LazyGroup):
    """The sub-commands, each of which needs its own extra."""

    table: ClassVar = {
        "serve": "Put load on a server and measure TTFT, TPOT, throughput and goodput.",
        "kernels": "Measure what each launch of a step costs on a device.",
    }
    path: ClassVar = ("bench",)


bench = typer.Typer(
    cls=Benches,
    help="Measure a server under load, or each kernel of a step.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
)


@bench.callback()
def _group() -> None:
    """Keep this a group of commands."""
