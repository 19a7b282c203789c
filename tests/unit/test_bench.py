"""The bench's arithmetic: percentiles, goodput, traces, scaling, prompts, plots."""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearfar.errors import RequestError
from nearfar.fallback_server.bench import figures, prompts, svg, traces
from nearfar.fallback_server.bench.client import Outcome
from nearfar.fallback_server.bench.load import LoadResult
from nearfar.fallback_server.bench.options import BenchOptions, Slo, Workload
from nearfar.fallback_server.bench.prompts import Words
from nearfar.fallback_server.bench.traces import Item

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:48.1805900,91,16
"""
MOONCAKE = """{"timestamp": 500, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 2]}
{"timestamp": 2500, "input_length": 1030, "output_length": 9, "hash_ids": [0, 1, 3]}
"""
WORDS = Words({"the": 1, "cat": 2, "elephant": 3}, 5, True)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_percentiles_are_numpys(values: list[float], part: float) -> None:
    found = figures.percentile(sorted(values), part)
    assert found == pytest.approx(float(np.quantile(np.array(values), part)), rel=1e-9, abs=1e-9)


def outcome(ttft: float, tpot: float, tokens: int = 11, error: str | None = None) -> Outcome:
    last = 1 + ttft + tpot * (tokens - 1)
    return Outcome(1.0, 1.25, last + 0.5, 1 + ttft, last, (tpot,), 5, 20, 11, 22, tokens, 11, error, "why")


def test_figures_of_a_level() -> None:
    slow, late = outcome(0.5, 0.3), outcome(2.0, 0.05)
    run = LoadResult(
        [outcome(0.5, 0.05), slow, late, outcome(0.1, 0.01, error="HTTP 429"), outcome(0.9, 9.0, tokens=1)],
        10.0,
        2,
    )
    made = figures.level("4 at once", "closed", 4, run, Slo(1.0, 0.1))
    # One request kept both bounds, one token has no TPOT; the failed request counts as sent, and for nothing
    # else.
    assert (made.requests, made.ok, made.goodput, made.good) == (5, 4, 0.2, 0.4)
    assert made.errors == {"HTTP 429": 1}
    assert made.examples == {"HTTP 429": "why"}
    assert made.output_tokens_per_second == pytest.approx((3 * 11 + 1) / 10)
    assert made.requests_per_second == pytest.approx(0.4)
    assert made.ttft.p50 == pytest.approx(0.7)
    assert made.tpot.count == 3
    assert made.tpot.max == pytest.approx(0.3)
    assert made.e2e.max == pytest.approx(0.5 + 3.0 + 0.5)
    assert (made.cached_part, made.prompt_error, made.short_answers) == (0.5, 2.0, 1)
    assert made.lag.p99 == pytest.approx(0.25)


def test_a_level_without_an_answer_has_figures() -> None:
    made = figures.level("1 at once", "closed", 1, LoadResult(), Slo())
    assert (made.requests, made.good, made.ttft.count, made.ttft_curve) == (0, 0.0, 0, ())


def test_traces_are_read(tmp_path: Path) -> None:
    azure, mooncake = tmp_path / "a.csv", tmp_path / "m.jsonl"
    azure.write_text(AZURE)
    mooncake.write_text(MOONCAKE)
    items = traces.read_trace(azure)
    assert [(item.prompt_tokens, item.output_tokens) for item in items] == [(374, 44), (91, 16), (396, 109)]
    assert [item.at for item in items] == pytest.approx([0, 1.5, 4.314579], abs=1e-6)
    first, second = traces.read_trace(mooncake)
    assert (first.at, second.at, first.blocks, second.blocks) == (0, 2.0, (0, 1, 2), (0, 1, 3))


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.txt", AZURE), ("a.csv", "x,y\n1,2\n"), ("a.csv", ""), ("a.jsonl", "{}"), ("a.jsonl", "[")],
)
def test_what_is_no_trace_is_said(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RequestError, match=name):
        traces.read_trace(tmp_path / name)
    with pytest.raises(RequestError, match="cannot be read"):
        traces.read_trace(tmp_path / "absent.csv")


def test_the_seed_decides_all() -> None:
    def made(seed: int) -> tuple[object, ...]:
        work = Workload(seed=seed)
        items = traces.synthetic(work, 50)
        return items, traces.sample(items, work, 80), traces.window(items, work, 10)

    assert made(3) == made(3)
    assert all(a != b for a, b in zip(made(3), made(4), strict=True))


def test_synthetic_lengths_and_arrivals_have_their_means() -> None:
    items = traces.synthetic(Workload(prompt_tokens=200, output_tokens=50, spread=0.5), 4000)
    assert sum(item.prompt_tokens for item in items) / 4000 == pytest.approx(200, rel=0.05)
    assert sum(item.output_tokens for item in items) / 4000 == pytest.approx(50, rel=0.05)
    assert items[-1].at == pytest.approx(4000, rel=0.05)
    assert {item.prompt_tokens for item in traces.synthetic(Workload(spread=0), 9)} == {128}


def test_a_sample_repeats_only_when_all_have_come() -> None:
    items = [Item(float(i), i + 1, 1) for i in range(10)]
    chosen = traces.sample(items, Workload(), 25)
    assert len(chosen) == 25
    assert sorted(i.prompt_tokens for i in chosen[:10]) == list(range(1, 11))
    assert max(chosen.count(item) for item in items) == 3


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20), st.floats(0.01, 1000))
def test_a_rate_keeps_the_bursts(gaps: list[float], rate: float) -> None:
    items = [Item(at, 1, 1) for at in itertools.accumulate([0.0, *gaps])]
    made = traces.at_rate(items, rate)
    assert (len(made) - 1) / made[-1].at == pytest.approx(rate)
    factor = made[-1].at / items[-1].at
    assert [item.at for item in made] == pytest.approx([item.at * factor for item in items])
    assert traces.at_rate(items, None) == items


@given(
    st.integers(1, 100_000),
    st.integers(1, 100_000),
    st.floats(0.001, 3),
    st.one_of(st.none(), st.integers(64, 8192)),
    st.integers(0, 20),
    st.one_of(st.none(), st.integers(1, 500)),
)
def test_lengths_fit(
    prompt: int, output: int, scale: float, context: int | None, shared: int, top: int | None
) -> None:
    work = Workload(scale=scale, shared_prefix=shared, max_prompt=top, max_output=top)
    (made,) = traces.fit([Item(0, prompt, output, (1,), 512)], work, context, 5)
    assert made.prompt_tokens >= 6
    assert made.output_tokens >= 1
    if context:
        assert made.prompt_tokens + made.output_tokens <= context
    if top:
        assert made.prompt_tokens <= max(top, 6)
        assert made.output_tokens <= top
    elif not context:
        assert made.output_tokens == max(1, round(output * scale))


def cost(text: str) -> int:
    opening, *words = text.split(" ")
    assert opening == prompts.OPENING
    return WORDS.overhead + sum(WORDS.costs[word] for word in words)


@given(st.integers(6, 300), st.lists(st.integers(0, 9), max_size=5), st.integers(1, 80), st.integers(0, 50))
def test_prompts_cost_what_was_asked_for(tokens: int, blocks: list[int], block: int, shared: int) -> None:
    item = Item(0, tokens, 1, tuple(blocks), block)
    made = prompts.text(WORDS, item, 0, shared, "seed")
    assert cost(made) == tokens
    assert made == prompts.text(WORDS, item, 0, shared, "seed")


def test_equal_blocks_are_equal_text_and_nothing_else_is() -> None:
    def words(blocks: tuple[int, ...], index: int, shared: int = 0) -> list[str]:
        return prompts.text(WORDS, Item(0, 65, 1, blocks, 20), index, shared, "s").split()

    def common(a: list[str], b: list[str]) -> int:
        return sum(
            WORDS.costs[x]
            for x, _ in itertools.takewhile(lambda p: p[0] == p[1], zip(a[1:], b[1:], strict=False))
        )

    assert 40 <= common(words((1, 2, 3), 0), words((1, 2, 4), 1)) < 50
    assert words((1, 2, 3), 0) == words((1, 2, 3), 1)
    assert common(words((), 0), words((), 1)) < 10
    assert 30 <= common(words((), 0, 30), words((), 1, 30)) < 40


@given(st.floats(1e-6, 1e9))
def test_ticks_are_round_and_reach_the_top(top: float) -> None:
    ticks = svg.nice(top)
    assert ticks[0] == 0
    assert top * (1 - 1e-6) <= ticks[-1] <= 2 * top
    assert 2 <= len(ticks) <= 7
    assert svg.nice(0) == svg.nice(math.inf) == [0.0, 1.0]


def test_a_chart_is_a_picture_of_its_points() -> None:
    lines = [svg.Line("a < b", ((1, 10), (4, 20), (16, 40))), svg.Line("c", ((1, 0), (4, 0), (16, 0)))]
    drawn, _, _ = svg.chart("a & b", "x", "y", lines, even=True, bound=20).partition('<div class="legend">')
    root = ET.fromstring(drawn)
    dots = [(float(c.get("cx", 0)), float(c.get("cy", 0))) for c in root.iter("circle")]
    xs, ys = zip(*dots[:3], strict=True)
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)  # 1, 4, 16 are equally far apart
    assert ys[0] - ys[1] == pytest.approx((ys[1] - ys[2]) / 2, abs=0.2)
    assert svg.chart("empty", "x", "y", []) == ""


@pytest.mark.parametrize(
    "wrong", [{"mode": "ajar"}, {"api": "rest"}, {"concurrency": (0,)}, {"rates": (-1.0,)}, {"requests": 0},
              {"rates": (math.nan,)}]
)  # fmt: skip
def test_wrong_options_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong)).removesuffix("s")):
        BenchOptions(**wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError):
        Workload(scale=0.0)
