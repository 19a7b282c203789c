"""What a look at the prompt for a fitted router costs in a browser's tab: time to the first token.

    python benchmarks/router_tab.py out/small/wasm --questions DIR

DIR has `test.jsonl` of GSM8K. The chat page of `nearfar web` answers each question twice with its client, in
turn with a router and without; each time the prompt begins with another number, so that the cache has none of
it. The router looks at a row of the model, as one with `--probe` does, and keeps all prompts on the device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nearfar.routing.fitted import FittedRouter, Point, Probe, Regression, row_tokens

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.support.browser import Page, browser, new_page, serve

ASK = """
const { client } = window.nearfar;
const { content, router } = argument;
client.setPolicy({ ttft: null, escalation: "off", router });
const asked = { messages: [{ role: "user", content }], temperature: 0, max_tokens: 1, stream: true };
const began = performance.now();
let first = null, usage = null, path = null;
asked.stream_options = { include_usage: true };
for await (const chunk of await client.chat.completions.create(asked)) {
  if (chunk.choices[0]?.delta.content) first ??= performance.now() - began;
  usage = chunk.usage ?? usage;
  path = chunk.x_nearfar?.path ?? path;
}
const { prompt_tokens, prompt_tokens_details: { cached_tokens } } = usage;
return [first ?? performance.now() - began, prompt_tokens, cached_tokens, path];
"""
MODEL = """
const { checkpoint, quantization, vocabSize } = engine.model;
return [checkpoint, quantization, vocabSize];
"""


def keeping(page: Page) -> dict[str, Any]:
    """A router for the page's model that finds every prompt easy."""
    checkpoint, quantization, size = page.run(MODEL)
    tokens = row_tokens(size)
    features = ("length", "entropy", "best", "margin")
    zeros, ones = (0.0,) * len(features), (1.0,) * len(features)
    probe = Probe(tokens, (0.0,) * len(tokens), 0.0)
    prompt = Regression(features, zeros, ones, zeros, -5.0, 0.5, probe)
    artifact = f"{checkpoint or ''}/{quantization or ''}"
    made = FittedRouter("easy", artifact, 50, prompt, 0.5, None, None, 8, (Point(0, 1, None, 0, None),))
    return {"format": "nearfar-router", "version": 2, **asdict(made)}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--count", type=int, default=12)
    given = parser.parse_args()
    rows = [json.loads(line) for line in (given.questions / "test.jsonl").open(encoding="utf-8")]
    with serve(given.artifact, target=None) as address, browser() as chromium:
        page = new_page(chromium, address).open()
        if page.wait("idle", "error") != "idle":
            raise SystemExit(page.notice)
        router = keeping(page)
        ratios, again = [], []
        for at, row in enumerate(rows[: given.count + 2]):
            seconds = {}
            for turn, looks in enumerate((at % 2 == 0, at % 2 == 1)):
                content = f"{10 + 2 * at + turn}. {row['question']}"
                argument = {"content": content, "router": router if looks else None}
                seconds[looks], tokens, cached, path = page.run(ASK, argument)
                assert path == ["device"], path
                if looks and at > 1:
                    again.append(tokens - cached)
            print(f"{tokens} tokens; with a look {seconds[True]:.0f} ms, without {seconds[False]:.0f} ms")
            if at > 1:  # the first two compile kernels
                ratios.append(seconds[True] / seconds[False])
    print(f"tokens computed again: {sorted(set(again))}")
    median = statistics.median(ratios)
    print(f"time to the first token with a look, over without: median {median:.3f} of {len(ratios)}")


if __name__ == "__main__":
    main()
