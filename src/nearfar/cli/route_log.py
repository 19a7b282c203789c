"""`nearfar route log`: sums up the decision records of a hybrid client."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from nearfar.errors import RequestError


@dataclass
class RouteSummary:
    """Counts of requests by the place where their answer ended; costs in the policy's unit; times in seconds.

    `private_by_earlier_text` and `private_by_quotation` count requests that became private because they
    repeated, or quoted, a text of an earlier private one.
    """

    requests: int = 0
    device: int = 0
    cloud: int = 0
    both: int = 0
    degraded: int = 0
    failed: int = 0
    private: int = 0
    private_by_earlier_text: int = 0
    private_by_quotation: int = 0
    spent: float = 0.0
    saved: float = 0.0
    median_ttft_device: float | None = None
    median_ttft_cloud: float | None = None
    reasons: dict[str, int] = field(default_factory=dict)


def log(
    file: Annotated[
        Path, typer.Argument(help="Decision records, as HybridClient(records=FILE) writes them.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Sum up decision records: where answers came from, why, what it cost and saved."""
    summary = summarize(_read(file))
    if as_json:
        print(json.dumps(asdict(summary)))
        return
    table = Table(box=None, show_header=False)
    for name, value in asdict(summary).items():
        if name == "reasons":
            continue
        table.add_row(
            name.replace("_", " "),
            f"{value:,.4g}" if isinstance(value, float) else str(value if value is not None else "–"),
        )
    for code, count in summary.reasons.items():
        table.add_row(f"reason {code}", str(count))
    Console(highlight=False).print(table)


def summarize(records: Iterator[dict[str, Any]]) -> RouteSummary:
    """Count records."""
    made, reasons = RouteSummary(), Counter[str]()
    first: dict[str, list[float]] = {"device": [], "cloud": []}
    for record in records:
        outcome = record["outcome"]
        made.requests += 1
        made.private += bool(record["request"]["private"])
        made.private_by_earlier_text += record.get("private_by") == "earlier"
        made.private_by_quotation += record.get("private_by") == "quote"
        route, path = outcome.get("route"), outcome.get("path", [])
        made.failed += outcome.get("error") not in (None, "stopped")
        made.device += bool(path) and route == "device"
        made.cloud += bool(path) and route == "cloud"
        made.both += len(set(path)) > 1
        made.degraded += bool(outcome.get("degraded"))
        made.spent += outcome.get("spent") or 0.0
        made.saved += outcome.get("saved") or 0.0
        reasons.update({reason["code"] for reason in outcome.get("reasons", record["decision"]["reasons"])})
        if path and outcome.get("ttft") is not None:
            first[path[0]].append(outcome["ttft"])
    made.reasons = dict(reasons.most_common())
    made.median_ttft_device = median(first["device"]) if first["device"] else None
    made.median_ttft_cloud = median(first["cloud"]) if first["cloud"] else None
    return made


def _read(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    record = json.loads(line)
                    if not {"request", "decision", "outcome"} <= set(record):
                        raise ValueError("request, decision or outcome is missing")
                except (ValueError, TypeError) as error:
                    raise RequestError(f"{path}:{number} is not a decision record: {error}") from error
                yield record
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}") from error
