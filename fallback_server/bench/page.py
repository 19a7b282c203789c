"""Renders the report as one self-contained HTML page."""

from __future__ import annotations

from html import escape

from nearfar.fallback_server.bench.bench import BenchReport
from nearfar.fallback_server.bench.figures import Distribution, LevelFigures
from nearfar.fallback_server.bench.svg import Line, chart
from nearfar.fallback_server.bench.table import remarks
from nearfar.version import __version__

CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #667; --rule: #d8dce2; --ground: #fff }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --dim: #9aa3ad; --rule: #3a414a; --ground: #14171b } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground); max-width: 1000px;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem; margin-bottom: 0 } p { margin: .3rem 0; color: var(--dim) }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 1.2rem; margin: 1.5rem 0 }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%;
  font-size: .87em }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--rule); white-space: nowrap }
th:first-child, td:first-child { text-align: left }
svg { width: 100% } svg text { fill: var(--ink); font-size: 12px } svg .title { font-weight: 600; font-size: 13px }
svg .tick, svg .axis { fill: var(--dim); font-size: 11px } .grid { stroke: var(--rule) }
.bound { stroke: #d33; stroke-dasharray: 5 4 } .line { fill: none; stroke: var(--c); stroke-width: 2 } .dot { fill: var(--c) }
.legend { font-size: 12px; color: var(--dim); margin-left: 60px } .key { margin-right: 1rem }
.key::before { content: ""; display: inline-block; width: .8em; height: .8em; margin-right: .35em; background: var(--c) }
.c0 { --c: #3274d9 } .c1 { --c: #e0762f } .c2 { --c: #b5427a } .c3 { --c: #2f9e6e } .c4 { --c: #8a63d2 } .c5 { --c: #c29b1d }
.c6 { --c: #3aa6b9 } .c7 { --c: #7a7f87 }
"""
HEADS = (
    "load",
    "requests",
    "failed",
    "req/s",
    "tokens/s",
    "TTFT p50",
    "p95",
    "p99",
    "TPOT p50",
    "p95",
    "p99",
    "end to end p50",
    "p95",
    "p99",
    "cached",
    "goodput",
    "within SLO",
)


def page(report: BenchReport) -> str:
    options, server = report.options, report.server
    work, slo = options.work, options.slo
    lengths = f"{work.trace.name}, lengths × {work.scale:g}" if work.trace else (
        f"synthetic, {work.prompt_tokens} prompt and {work.output_tokens} answer tokens on average"
    )  # fmt: skip
    facts = (
        f"{lengths}; shared beginning {work.shared_prefix} tokens; seed {work.seed}; {options.api}; "
        f"temperature {options.temperature:g}; SLO: TTFT ≤ {slo.ttft:g} s, TPOT ≤ {slo.tpot:g} s; nearfar "
        f"{__version__}"
    )
    plots = "".join(f"<div>{one}</div>" for one in _plots(report) if one)
    rows = "".join(_row(one) for one in report.levels)
    said = "".join(f"<p>{escape(line)}</p>" for line in remarks(report))
    heads = "".join(f"<th>{head}</th>" for head in HEADS)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<title>{escape(server.model)}: load</title><meta name="viewport" content="width=device-width">'
        f"<style>{CSS}</style></head><body>"
        f"<h1>{escape(server.model)} under load</h1><p>{escape(server.url)}</p><p>{escape(facts)}</p>"
        f'<div class="plots">{plots}</div><div class="scroll"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div><p>Times in ms.</p>{said}</body></html>\n"
    )


def _plots(report: BenchReport) -> list[str]:
    made = []
    slo = report.options.slo
    for mode, axis in (("closed", "requests at once"), ("open", "requests sent a second")):
        levels = [one for one in report.levels if one.mode == mode and one.ok]
        if not levels:
            continue
        rate = Line("tokens/s", tuple((one.load, one.output_tokens_per_second) for one in levels))
        made.append(chart("Answer tokens a second", axis, "tokens/s", [rate], even=True))
        sent = Line("ended well", tuple((one.load, one.requests_per_second) for one in levels))
        good = Line("within the SLO", tuple((one.load, one.goodput) for one in levels))
        made.append(chart("Requests a second", axis, "req/s", [sent, good], even=True))
        for name, bound in (("ttft", slo.ttft), ("tpot", slo.tpot)):
            lines = [Line(part, tuple((one.load, getattr(getattr(one, name), part) * 1e3) for one in levels))
                     for part in ("p50", "p95", "p99")]  # fmt: skip
            made.append(chart(name.upper(), axis, "ms", lines, even=True, bound=bound * 1e3))
        for name in ("ttft", "tpot"):
            lines = [
                Line(
                    one.name,
                    tuple((part * 100, value * 1e3) for part, value in getattr(one, f"{name}_curve")),
                    False,
                )
                for one in levels
            ]
            made.append(chart(f"{name.upper()}: distribution", "percent of requests", "ms at most", lines))
    return made


def _row(one: LevelFigures) -> str:
    cells = [
        escape(one.name),
        f"{one.requests}",
        f"{one.requests - one.ok}",
        f"{one.requests_per_second:.2f}",
        f"{one.output_tokens_per_second:.1f}",
        *_ms(one.ttft),
        *_ms(one.tpot),
        *_ms(one.e2e),
        f"{one.cached_part:.0%}",
        f"{one.goodput:.2f}",
        f"{one.good:.0%}",
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _ms(summary: Distribution) -> list[str]:
    return [
        f"{value * 1000:.1f}" if summary.count else "–" for value in (summary.p50, summary.p95, summary.p99)
    ]
