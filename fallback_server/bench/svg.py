"""Line charts as inline SVG, without a library or a network. The page's CSS gives the colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 280
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 34, 44
COLOURS = ("#2a6f97", "#888", "#c1121f", "#588157", "#e09f3e", "#7209b7", "#006d77", "#bc6c25")
STYLE = "".join(
    [
        "svg{background:#fff;font-family:sans-serif}text{fill:#222;font-size:12px}",
        ".title{font-weight:600;font-size:13px}.tick,.axis{fill:#666;font-size:11px}.grid{stroke:#ddd}",
        ".line{fill:none;stroke-width:2}",
        *(f".line.c{at}{{stroke:{one}}}.dot.c{at},.k{at}{{fill:{one}}}" for at, one in enumerate(COLOURS)),
    ]
)
"""The style of a picture that stands alone."""


@dataclass(frozen=True)
class Line:
    """Points (x, y) under one name. With `dots` each point has a mark and a tooltip."""

    name: str
    points: tuple[tuple[float, float], ...]
    dots: bool = True


def chart(
    title: str,
    x_name: str,
    y_name: str,
    lines: Sequence[Line],
    *,
    even: bool = False,
    bound: float | None = None,
) -> str:
    """Return a chart as SVG for a page; "" without points. With `even`, the x values (1, 4, 16, …) are
    equally far apart. `bound` draws a horizontal line (the SLO).
    """
    drawn = _drawn(title, x_name, y_name, lines, even, bound)
    return f"{drawn}</svg>{_legend(lines)}" if drawn else ""


def picture(title: str, x_name: str, y_name: str, lines: Sequence[Line]) -> str:
    """Return a chart as an SVG file that stands alone, with its colours and its legend; "" without points."""
    drawn = _drawn(title, x_name, y_name, lines, False, None)
    if not drawn:
        return ""
    names = "".join(
        f'<text class="key k{index % 8}" text-anchor="end" x="{WIDTH - RIGHT}" '
        f'y="{HEIGHT - BOTTOM - 10 - 14 * (len(lines) - 1 - index)}">{escape(line.name)}</text>'
        for index, line in enumerate(lines)
    )
    head, rest = drawn.split(">", 1)
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{STYLE}</style>{rest}{names}</svg>\n'


def _drawn(
    title: str, x_name: str, y_name: str, lines: Sequence[Line], even: bool, bound: float | None
) -> str:
    """The SVG without its end; "" without points."""
    xs = sorted({x for line in lines for x, _ in line.points})
    ys = [y for line in lines for _, y in line.points]
    if not xs:
        return ""
    ticks = nice(max(ys, default=0.0))
    x_ticks = xs if even else nice(xs[-1])
    places = {x: index for index, x in enumerate(xs)} if even else {x: x for x in (*xs, *x_ticks)}
    right = max((len(xs) - 1) if even else x_ticks[-1], 1e-9)

    def px(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * places[x] / right

    def py(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y / ticks[-1]

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
             f'<text class="title" x="{LEFT}" y="18">{escape(title)}</text>']  # fmt: skip
    for y in ticks:
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(y):.1f}" y2="{py(y):.1f}"/>'
        )
        parts.append(f'<text class="tick" text-anchor="end" x="{LEFT - 6}" y="{py(y) + 4:.1f}">{y:g}</text>')
    for x in x_ticks:
        parts.append(
            f'<text class="tick" text-anchor="middle" x="{px(x):.1f}" '
            f'y="{HEIGHT - BOTTOM + 16}">{x:.4g}</text>'
        )
    parts.append(
        f'<text class="axis" text-anchor="middle" x="{(LEFT + WIDTH) / 2}" '
        f'y="{HEIGHT - 8}">{escape(x_name)}</text>'
    )
    parts.append(
        f'<text class="axis" text-anchor="middle" transform="translate(13 {HEIGHT / 2}) '
        f'rotate(-90)">{escape(y_name)}</text>'
    )
    if bound is not None and bound <= ticks[-1]:
        parts.append(
            f'<line class="bound" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(bound):.1f}" '
            f'y2="{py(bound):.1f}"/>'
        )
    for index, line in enumerate(lines):
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in line.points)
        parts.append(f'<polyline class="line c{index % 8}" points="{path}"/>')
        if line.dots:
            parts += [
                f'<circle class="dot c{index % 8}" cx="{px(x):.1f}" cy="{py(y):.1f}" r="3.5">'
                f"<title>{escape(line.name)}: {x:g}, {y:.4g}</title></circle>"
                for x, y in line.points
            ]
    return "".join(parts)


def _legend(lines: Sequence[Line]) -> str:
    if len(lines) < 2:
        return ""
    keys = [f'<span class="key c{index % 8}">{escape(line.name)}</span>' for index, line in enumerate(lines)]
    return f'<div class="legend">{"".join(keys)}</div>'


def nice(top: float, count: int = 5) -> list[float]:
    """Round ticks from 0 to at least `top`."""
    if top <= 0 or not math.isfinite(top):
        return [0.0, 1.0]
    rough = top / count
    power = 10.0 ** math.floor(math.log10(rough))
    spacing = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * (1 - 1e-9))
    return [float(f"{index * spacing:.10g}") for index in range(math.ceil(top / spacing - 1e-9) + 1)]
