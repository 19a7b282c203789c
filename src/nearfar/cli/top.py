"""`nearfar top`: a live view of a running server, from its metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated

import httpx
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.live import Live
from rich.table import Table

from nearfar.cli.drawing import draws
from nearfar.cli.keyboard import keyboard
from nearfar.errors import NearfarError
from nearfar.fallback_server.http.metrics import PREFIX
from nearfar.remote.errors import shown_page, unreachable

Values = dict[tuple[str, str], float]


@dataclass(frozen=True)
class MetricsSample:
    """The metrics at one moment: values by name and by the one label in addition to the model (`le`, outcome,
    …).
    """

    at: float
    values: Values

    def get(self, name: str, label: str = "") -> float:
        """A value, 0 if it is not there."""
        return self.values.get((PREFIX + name, label), 0.0)


def top(
    url: Annotated[
        str, typer.Argument(help="The server, such as http://127.0.0.1:8000.")
    ] = "http://127.0.0.1:8000",
    key: Annotated[
        str | None, typer.Option(envvar="NEARFAR_ADMIN_KEY", help="An admin's key, if the server has keys.")
    ] = None,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two views.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one view and end.")] = False,
) -> None:
    """Watch a running server: requests, cache, speeds, latencies. Rates are those of the last interval."""
    if not once and not draws():
        raise NearfarError(
            "top redraws a terminal, and stdout is not a terminal that can do so: --once prints one view and "
            "ends"
        )
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=5) as client:
        before = look(client)
        if once:
            Console().print(view(url, before, before))
            return
        with keyboard() as pressed, Live(_ending(view(url, before, before)), auto_refresh=False) as live:
            live.refresh()
            while pressed(every) not in ("q", "Q"):
                now = look(client)
                live.update(_ending(view(url, before, now)), refresh=True)
                before = now


def _ending(table: Table) -> Table:
    """Add the line that says how to end the view; any other key refreshes it."""
    table.caption = "q or Ctrl-C ends"
    return table


def look(client: httpx.Client) -> MetricsSample:
    """Read the metrics now."""
    try:
        response = client.get("/metrics")
        response.raise_for_status()
    except httpx.HTTPStatusError as error:
        raise NearfarError(
            f"{error.request.url}: status {error.response.status_code}: {shown_page(error.response.text)}"
        ) from error
    except httpx.HTTPError as error:
        raise NearfarError(unreachable(str(client.base_url), error)) from error
    return MetricsSample(time.monotonic(), parse(response.text))


def parse(text: str) -> Values:
    """Values of metrics in Prometheus' text format, summed over models."""
    values: Values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            label = next((value for name, value in sample.labels.items() if name != "model_name"), "")
            values[sample.name, label] = values.get((sample.name, label), 0.0) + sample.value
    return values


def view(url: str, before: MetricsSample, now: MetricsSample) -> Table:
    """The figures as a table."""
    seconds = max(now.at - before.at, 1e-9)

    def rate(name: str, label: str = "") -> float:
        return (now.get(name, label) - before.get(name, label)) / seconds

    queries = now.get("prefix_cache_queries_total")
    hits = now.get("prefix_cache_hits_total") / queries if queries else 0.0
    table = Table(title=f"nearfar at {url}", show_header=False)
    table.add_row(
        "running / waiting", f"{now.get('num_requests_running'):.0f} / {now.get('num_requests_waiting'):.0f}"
    )
    table.add_row("KV cache", f"{now.get('kv_cache_usage_perc'):.1%}")
    table.add_row("prefix hits", f"{hits:.1%}")
    table.add_row(
        "preemptions / restarts",
        f"{now.get('num_preemptions_total'):.0f} / {now.get('engine_restarts_total'):.0f}",
    )
    table.add_row("prompt tokens/s", f"{rate('prompt_tokens_total'):.1f}")
    table.add_row("generated tokens/s", f"{rate('generation_tokens_total'):.1f}")
    for title, name in (
        ("TTFT", "time_to_first_token_seconds"),
        ("between tokens", "inter_token_latency_seconds"),
        ("end to end", "e2e_request_latency_seconds"),
    ):
        table.add_row(f"{title}, p50 / p95", f"{_quantile(now, name, 0.5)} / {_quantile(now, name, 0.95)}")
    outcomes = {
        label: value for (name, label), value in now.values.items() if name == f"{PREFIX}requests_total"
    }
    table.add_row(
        "requests", ", ".join(f"{value:.0f} {label}" for label, value in sorted(outcomes.items())) or "none"
    )
    return table


def _quantile(sample: MetricsSample, name: str, part: float) -> str:
    """A quantile of a histogram since the server's start: the upper bound of its bucket."""
    buckets = sorted(
        (float(label), value)
        for (of, label), value in sample.values.items()
        if of == f"{PREFIX}{name}_bucket"
    )
    total = buckets[-1][1] if buckets else 0.0
    if not total:
        return "–"
    bound = next(bound for bound, count in buckets if count >= part * total)
    return f"≤ {bound:g} s"
