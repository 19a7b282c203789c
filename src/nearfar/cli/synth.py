"""`nearfar synth`: a checkpoint of a published shape with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from nearfar.cli.progress import bytes_bar


def synth(
    shape: Annotated[
        str | None, typer.Argument(help="The name of a published shape; `--list` shows all names.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The directory to write.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same checkpoint.")] = 0,
    show: Annotated[bool, typer.Option("--list", help="Show the shapes, and write nothing.")] = False,
) -> None:
    """Write a checkpoint of a published shape with random weights, to measure speed without a download."""
    from nearfar.build.synth import synth_checkpoint

    if show:
        _show()
        return
    if shape is None or output is None:
        raise typer.BadParameter(
            "name a shape and the directory to write: nearfar synth SHAPE -o DIR (--list shows them)"
        )
    with bytes_bar(f"writing {shape}") as told:
        synth_checkpoint(shape, output, seed, told)
    typer.echo(f"wrote {shape} with random weights (seed {seed}) to {output}")


def _show() -> None:
    """A line for each shape: its name, its weights, and what the list of its step says."""
    from nearfar.build.synth import published, shape_names

    table = Table(
        "shape", "architecture", "weights", "layers", "context", "the shape of", box=None, pad_edge=False
    )
    for name in shape_names():
        shape = published(name)
        weights = sum(tensor.size for tensor in shape.tensors.values())
        model = shape.built
        layers = shape.config["num_hidden_layers"]
        table.add_row(
            name,
            model.architecture,
            f"{weights / 1e6:,.0f} M",
            str(layers),
            f"{model.context_length:,}",
            shape.model,
        )
    Console(width=120).print(table)
