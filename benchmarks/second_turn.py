"""Time to the first token of a conversation's second turn, as a share of the first turn's, on the CPU.

    python benchmarks/second_turn.py [--shape lfm2.5-350m] [--tokens 2000] [--rounds 3]
    python benchmarks/second_turn.py ARTIFACT

The second prompt is the first one, its answer and some new tokens. Each round has its own prompt. The same in
a browser: benchmarks/browser.py --second-turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from nearfar.edge_runtime import Engine, SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.shared.engines import artifact_of

ANSWER, NEW = 16, 32
"""Tokens of the first answer, and new tokens of the second turn."""


def turn(engine: Engine, prompt: list[int]) -> tuple[float, list[int]]:
    """Seconds to the first token of an answer, and its tokens."""
    start, first, answer = time.perf_counter(), 0.0, []
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    for token in engine.generate(prompt, sampling):
        first = first or time.perf_counter() - start
        answer.append(token.token)
    return first, answer


def conversation(engine: Engine, seed: int, tokens: int) -> tuple[float, float]:
    """Seconds to the first token of the first and of the second turn."""
    vocab, rng = engine.manifest.model.vocab_size, np.random.default_rng(seed)
    prompt = rng.integers(0, vocab, tokens).tolist()
    first, answer = turn(engine, prompt)
    second, _ = turn(engine, [*prompt, *answer, *rng.integers(0, vocab, NEW).tolist()])
    return first, second


def main() -> None:
    """Measure, print each round and the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path, nargs="?")
    parser.add_argument("--shape", default="lfm2.5-350m", help="built to q4, where no artifact is given")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        artifact = args.artifact or artifact_of(Path(folder), args.shape, "cpu")
        with Engine.load(artifact) as engine:
            turn(engine, [1, 2, 3])
            rounds = [conversation(engine, seed, args.tokens) for seed in range(args.rounds)]
    for first, second in rounds:
        print(f"first turn {first:.3f} s, second turn {second:.3f} s: {second / first:.3f}")
    print(f"median of the ratios: {statistics.median(second / first for first, second in rounds):.3f}")


if __name__ == "__main__":
    main()
