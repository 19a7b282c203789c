"""`nearfar route log`: sums up the decision records of a hybrid client."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from nearfar.routing.record_lines import RecordLine, read_lines


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
    summary = summarize(read_lines(file, ("request", "decision", "outcome"), "a decision record"))
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


def summarize(records: Iterable[RecordLine]) -> RouteSummary:
    """Count records. Raises RequestError for a line that is not a decision record."""
    made, reasons = RouteSummary(), Counter[str]()
    first: dict[str, list[float]] = {"device": [], "cloud": []}
    for record in records:
        path = _path(record)
        route = record.get("outcome.route")
        made.requests += 1
        made.private += bool(record.get("request.private"))
        made.private_by_earlier_text += record.get("private_by") == "earlier"
        made.private_by_quotation += record.get("private_by") == "quote"
        made.failed += record.get("outcome.error") not in (None, "stopped")
        made.device += bool(path) and route == "device"
        made.cloud += bool(path) and route == "cloud"
        made.both += len(set(path)) > 1
        made.degraded += bool(record.get("outcome.degraded"))
        made.spent += record.number_of("outcome.spent") or 0.0
        made.saved += record.number_of("outcome.saved") or 0.0
        reasons.update(_codes(record))
        ttft = record.number_of("outcome.ttft")
        if path and ttft is not None:
            first[path[0]].append(ttft)
    made.reasons = dict(reasons.most_common())
    made.median_ttft_device = median(first["device"]) if first["device"] else None
    made.median_ttft_cloud = median(first["cloud"]) if first["cloud"] else None
    return made


def _path(record: RecordLine) -> list[str]:
    """The sides that answered, in order."""
    path = record.of_kind("outcome.path", list) or []
    for at, side in enumerate(path):
        if side not in ("device", "cloud"):
            record.must(f"outcome.path.{at}", "device or cloud", side)
    return path


def _codes(record: RecordLine) -> set[str]:
    """The codes of the reasons: those of the outcome, or of the decision if the outcome has none."""
    name = "decision.reasons" if record.get("outcome.reasons") is None else "outcome.reasons"
    found = record.of_kind(name, list) or []
    for at, each in enumerate(found):
        if not isinstance(each, dict) or not isinstance(each.get("code"), str):
            record.must(f"{name}.{at}", "an object with a code", each)
    return {each["code"] for each in found}
