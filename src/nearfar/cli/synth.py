"""`nearfar synth`: a checkpoint of a published shape with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn


def synth(
    shape: Annotated[str, typer.Argument(help="llama-3.2-1b, smollm2-135m or qwen3-0.6b")],
    output: Annotated[Path, typer.Option("--output", "-o", help="directory to write")],
    seed: Annotated[int, typer.Option(min=0, help="one seed gives one checkpoint")] = 0,
) -> None:
    """Write a checkpoint of a published shape with random bfloat16 weights, to measure speed without a download."""
    from nearfar.synth import synth_checkpoint

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"writing {shape}", total=None)
        synth_checkpoint(shape, output, seed, lambda done, total: progress.update(task, completed=done, total=total))
    typer.echo(f"wrote {shape} with random weights (seed {seed}) to {output}")
