"""`nearfar route fit` and `nearfar route report`: a router from outcomes, and what it would have done."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from nearfar.routing.fitted import FittedRouter, threshold_for


def fit(
    records: Annotated[Path, typer.Argument(help="Decision records, with `knowledge` in each line.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The router to write.")],
    outcomes: Annotated[
        Path | None,
        typer.Option(help='Lines of {"id", "device_quality", "cloud_quality"}, if the records have none.'),
    ] = None,
    target: Annotated[
        str, typer.Option(help="share=0…1 of prompts for the cloud, or quality=0…1 to reach.")
    ] = "share=0.5",
) -> None:
    """Fit a router to outcomes: it learns from what the device's model shows about a prompt when the cloud
    answers better.

        nearfar route fit records.jsonl --outcomes outcomes.jsonl -o router.json --target quality=0.8

    A quality is from 0 (wrong) to 1 (right), of either side's answer to the prompt of that record.
    """
    from nearfar.routing import fitting

    made = fitting.fit(fitting.read_examples(records, outcomes))
    made = replace(made, threshold=threshold_for(made.curve, target))
    made.save(output)
    print(_summary(made))


def report(
    router: Annotated[Path, typer.Argument(help="A router that nearfar route fit made.")],
    picture: Annotated[Path | None, typer.Option(help="Write the curve as SVG.")] = None,
) -> None:
    """Print the quality for each share of prompts that goes to the cloud, and draw it.

    nearfar route report router.json --picture curve.svg
    """
    from nearfar.fallback_server.bench.svg import Line, chart

    made = FittedRouter.load(router)
    print(_summary(made))
    print("share  threshold  quality  at random")
    first, last = made.curve[0], made.curve[-1]
    for point in made.curve[::2]:
        even = first.quality + (last.quality - first.quality) * point.share
        print(f"{point.share:5.2f}  {point.threshold:9.3f}  {point.quality:7.3f}  {even:9.3f}")
    if picture is not None:
        points = tuple((point.share, point.quality) for point in made.curve)
        even_line = Line("at random", ((first.share, first.quality), (last.share, last.quality)), dots=False)
        lines = [Line("router", points), even_line]
        picture.write_text(
            chart("Quality by share", "share to the cloud", "quality", lines), encoding="utf-8"
        )


def _summary(made: FittedRouter) -> str:
    first, last = made.curve[0], made.curve[-1]
    return (
        f"{made.model}: {made.examples} examples, AUROC {made.auroc:.3f} on those kept back; quality "
        f"{first.quality:.3f} on the device, {last.quality:.3f} in the cloud; threshold {made.threshold:.3f}"
    )
