"""How long a decision takes, and the score that it needs: Python in this process, TypeScript in Node.

    python benchmarks/routing/decide_speed.py [--calls N] [--web DIR] [--json FILE]

Prompts of 200 and 2,000 characters, a multiple-choice question of 2,000, and 1,000,000 characters (of which
8,192 are read). Each call is timed by itself, after 200 that are not counted; the table gives the median and
the 99th percentile. The browser's engine is V8 in Chromium, the same as Node's; --web needs its node_modules
(esbuild bundles the sources).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from nearfar.routing.decision import decide
from nearfar.routing.difficulty.score import MODEL, Difficulty
from nearfar.routing.policy import Policy
from nearfar.routing.types import CloudState, DeviceState, RouteRequest

ROOT = Path(__file__).resolve().parents[2]
WARM = 200
SENTENCE = (
    "A tank holds 240 litres; pipe A fills it in 3 hours, and pipe B, which opens at noon, in 5. When is it "
    "full? "
)
OPTIONS = "".join(
    f"\n{letter}. It is full at {at} o'clock, not before. " for at, letter in enumerate("ABCD", 1)
)
PROMPTS = {
    "200 characters": (SENTENCE * 2)[:200],
    "2,000 characters": (SENTENCE * 20)[:2000],
    "2,000, multiple choice": (SENTENCE * 20)[: 2000 - len(OPTIONS)] + OPTIONS,
    "1,000,000 characters": (SENTENCE * 10_000)[:1_000_000],
}
CASE: dict[str, Any] = {
    "request": {
        "prompt_tokens": 500,
        "max_tokens": 300,
        "expected_tokens": None,
        "features": ["logprobs"],
        "difficulty": 0.4,
        "mode": None,
        "private": False,
        "conversation": {"last_route": "cloud", "cached_device": 0, "cached_cloud": 400, "spent": 100},
    },
    "device": {
        "available": True,
        "why": None,
        "context": 2048,
        "free_kv_tokens": 2048,
        "features": ["logprobs"],
        "prefill_tps": 400.0,
        "decode_tps": 40.0,
        "queue_seconds": 0,
        "battery": 0.8,
        "charging": False,
        "power_saver": False,
    },
    "cloud": {
        "available": True,
        "why": None,
        "breaker": "closed",
        "retry_after": 0,
        "context": 32768,
        "features": ["tools", "logprobs"],
        "round_trip": 0.3,
        "queue_seconds": 0,
        "prefill_tps": 5000.0,
        "decode_tps": 80.0,
        "metered": False,
        "price_in": 0.5,
        "price_out": 2.0,
    },
    "policy": {
        "mode": "auto",
        "difficulty_threshold": 0.5,
        "ttft": 2.0,
        "completion": 20.0,
        "battery_floor": 0.2,
        "budget_conversation": 5000,
        "budget_day": 100000,
        "budget_unit": "tokens",
        "spent_day": 100,
        "sticky_seconds": 1.0,
    },
}

Times = dict[str, list[float]]


def measure(call: Callable[[], object], calls: int) -> list[float]:
    """Microseconds of each call."""
    for _ in range(WARM):
        call()
    found = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        found.append((time.perf_counter() - start) * 1e6)
    return found


def in_python(calls: int) -> Times:
    """The scorer and the decision of this package."""
    model = Difficulty.load()
    found = {
        f"score, {name}": measure(lambda text=text: model.score(text), calls)
        for name, text in PROMPTS.items()
    }  # type: ignore[misc]
    request, policy = RouteRequest.parse(CASE["request"]), Policy.parse(CASE["policy"])
    device, cloud = DeviceState.parse(CASE["device"]), CloudState.parse(CASE["cloud"])
    return found | {"decide": measure(lambda: decide(request, device, cloud, policy), calls)}


def in_node(calls: int, web: Path) -> Times:
    """Times of the decision in TypeScript."""
    names = {"decide": "decide", "parsePolicy": "policy", "loadDifficulty": "difficulty"}
    exports = "".join(f'export {{ {name} }} from "./{file}.js";' for name, file in names.items())
    with tempfile.TemporaryDirectory() as work:
        bundle = Path(work) / "routing.mjs"
        esbuild = [
            web / "node_modules" / ".bin" / "esbuild",
            "--bundle",
            "--format=esm",
            "--platform=node",
            "--log-level=error",
        ]
        subprocess.run(
            [*map(str, esbuild), f"--outfile={bundle}"],
            input=exports,
            text=True,
            check=True,
            cwd=web / "src" / "routing",
        )
        job = {
            "bundle": bundle.as_uri(),
            "model": str(MODEL),
            "prompts": PROMPTS,
            "case": CASE,
            "warm": WARM,
            "calls": calls,
        }
        script = Path(__file__).with_suffix(".mjs")
        ran = subprocess.run(
            ["node", str(script)], input=json.dumps(job), text=True, check=True, stdout=subprocess.PIPE
        )
    times: Times = json.loads(ran.stdout)
    return times


def main() -> None:
    """Measure, show, and write --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--web", type=Path, default=ROOT / "web")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    both = {"Python": in_python(options.calls), "Node": in_node(options.calls, options.web)}
    table = Table(title=f"microseconds, {options.calls} calls each")
    for heading in ("", *(f"{name}: {figure}" for name in both for figure in ("median", "99 %"))):
        table.add_column(heading, justify="left" if not heading else "right")
    report: dict[str, dict[str, list[float]]] = {}
    for row in both["Python"]:
        report[row] = {
            name: [float(x) for x in np.percentile(times[row], [50, 99])] for name, times in both.items()
        }
        table.add_row(row, *(f"{value:,.1f}" for figures in report[row].values() for value in figures))
    Console(width=120).print(table)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
