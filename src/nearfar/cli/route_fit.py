"""`nearfar route fit` and `nearfar route report`: a router from outcomes, and what it would have done."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from nearfar.errors import RequestError
from nearfar.routing.fitted import FittedRouter
from nearfar.routing.targets import FORMS, point_for


def fit(
    records: Annotated[Path, typer.Argument(help="Decision records, with `knowledge` in each line.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The router to write.")],
    outcomes: Annotated[
        Path | None,
        typer.Option(help='Lines of {"id", "device_quality", "cloud_quality"}, if the records have none.'),
    ] = None,
    target: Annotated[str, typer.Option(help=f"{FORMS}.")] = "share=0.5",
    hold_tokens: Annotated[
        int, typer.Option(min=1, max=16, help="First tokens of an answer to look at before it is shown.")
    ] = 8,
    probe: Annotated[
        bool,
        typer.Option(help="Also look at the last hidden row: for prompts of known kinds, not in browsers."),
    ] = False,
    price_in: Annotated[
        float | None,
        typer.Option(min=0, help="The cloud's price of a million prompt tokens, if the records have none."),
    ] = None,
    price_out: Annotated[
        float | None, typer.Option(min=0, help="The cloud's price of a million answer tokens.")
    ] = None,
) -> None:
    """Fit a router to outcomes: it learns from what the device's model shows about a prompt, and about the
    first tokens of its answer, when the cloud answers better.

    nearfar route fit records.jsonl --outcomes outcomes.jsonl -o router.json --target quality=0.8

    A quality is from 0 (wrong) to 1 (right), of either side's answer to the prompt of that record.
    """
    from nearfar.routing import fitting

    if (price_in is None) != (price_out is None):
        raise RequestError("give both --price-in and --price-out, or none", "price_in")
    prices = None if price_in is None or price_out is None else fitting.Prices(price_in, price_out)
    read = fitting.read_examples(records, outcomes, prices)
    made = fitting.fit(read.enough, hold_tokens, probe)
    point = point_for(made.curve, target)
    made = replace(made, threshold=point.threshold, limit=point.limit)
    made.save(output)
    for left_out in read.left_out:
        print(f"left out: {left_out}")
    print(_summary(made))
    priced = "" if point.money is None else f", {point.money:.4g} per thousand requests"
    print(f"{target}: {point.share:.0%} of the prompts to the cloud, quality {point.quality:.3f}{priced}")


def report(
    router: Annotated[Path, typer.Argument(help="A router that nearfar route fit made.")],
    picture: Annotated[Path | None, typer.Option(help="Write the curve as SVG.")] = None,
) -> None:
    """Print the quality for each share of prompts that goes to the cloud, and draw it.

    nearfar route report router.json --picture curve.svg
    """
    from nearfar.fallback_server.bench.svg import Line
    from nearfar.fallback_server.bench.svg import picture as drawn

    made = FittedRouter.load(router)
    print(_summary(made))
    first, last = made.curve[0], made.curve[-1]
    priced = any(point.money is not None for point in made.curve)
    table = Table(box=None)
    names = ("share", "quality", "at random", "threshold", "limit", *(("per 1,000",) if priced else ()))
    for name in names:
        table.add_column(name, justify="right")
    for point in made.curve[::2]:
        even = first.quality + (last.quality - first.quality) * point.share
        numbers = (point.share, point.quality, even, point.threshold, point.limit)
        shown = ["–" if each is None else f"{each:.3f}" for each in numbers]
        money = [] if not priced else ["–" if point.money is None else f"{point.money:.4g}"]
        table.add_row(*shown, *money)
    Console(highlight=False).print(table)
    if picture is not None:
        points = tuple((point.share, point.quality) for point in made.curve)
        even_line = Line("at random", ((first.share, first.quality), (last.share, last.quality)), dots=False)
        lines = [Line("router", points), even_line]
        picture.write_text(
            drawn("Quality by share of the cloud", "share to the cloud", "quality", lines), encoding="utf-8"
        )


def _summary(made: FittedRouter) -> str:
    first, last = made.curve[0], made.curve[-1]
    later = "" if made.answer is None else f", {made.answer.auroc:.3f} after {made.tokens} tokens"
    limit = "" if made.limit is None else f", limit {made.limit:.3f}"
    return (
        f"{made.model}: {made.examples} examples, AUROC {made.prompt.auroc:.3f} on those kept back{later}; "
        f"quality {first.quality:.3f} on the device, {last.quality:.3f} in the cloud; threshold "
        f"{made.threshold:.3f}{limit}"
    )
