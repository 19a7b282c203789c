"""Time to the first token of a long system prompt: computed, and loaded from a snapshot.

    python benchmarks/snapshot.py [--shape smollm2-135m] [--tokens 2000] [--threads 2] [--rounds 5] [--json
    FILE]
    python benchmarks/snapshot.py ARTIFACT                     the same for an artifact that is there already

Each measurement is a process of its own with an empty cache, as at a start: the prompt computed; the snapshot
loaded (read, verified, written to the cache), then the same prompt. The question behind the prompt is 20
tokens. The table gives medians, and the medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from nearfar.edge_runtime import Engine, SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.shared.engines import artifact_of

QUESTION = 20


def prompt(vocab: int, count: int) -> list[int]:
    """Random tokens: for speed only their number matters."""
    return [int(token) for token in np.random.default_rng(0).integers(3, vocab, count + QUESTION)]


def open_engine(args: argparse.Namespace) -> Engine:
    """An engine that has computed something else, so that buffers and threads are warm."""
    engine = Engine.load(args.artifact, device=args.device, threads=args.threads, verify=False)
    first_token(engine, list(range(3, 259)))
    return engine


def first_token(engine: Engine, tokens: list[int]) -> float:
    """Seconds to the first token."""
    start = time.perf_counter()
    next(iter(engine.generate(tokens, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))))
    return time.perf_counter() - start


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Measure once in this process."""
    with open_engine(args) as engine:
        tokens = prompt(engine.manifest.model.vocab_size, args.tokens)
        if args.one == "save":
            start = time.perf_counter()
            made = engine.save_cache(args.snapshot, tokens=tokens[: args.tokens])
            return {"save": time.perf_counter() - start, "bytes": made.bytes, "saved_tokens": made.tokens}
        if args.one == "cold":
            return {"ttft": first_token(engine, tokens)}
        start = time.perf_counter()
        engine.load_cache(args.snapshot)
        return {"load": time.perf_counter() - start, "ttft": first_token(engine, tokens)}


def in_process(args: argparse.Namespace, one: str) -> dict[str, float]:
    """Measure in a process of its own."""
    options = [
        "--tokens",
        args.tokens,
        "--threads",
        args.threads,
        "--device",
        args.device,
        "--snapshot",
        args.snapshot,
    ]
    command = [sys.executable, __file__, args.artifact, *options, "--one", one]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr[-2000:])
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path, nargs="?")
    parser.add_argument(
        "--shape", default="smollm2-135m", help="a shape of `nearfar synth`, where no artifact is given"
    )
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=["save", "cold", "warm"], help=argparse.SUPPRESS)
    parser.add_argument("--snapshot", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measure(args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        args.artifact = args.artifact or artifact_of(Path(folder), args.shape, "cpu")
        args.snapshot = Path(folder) / "prompt.snap"
        saved = in_process(args, "save")
        rounds = [(in_process(args, "cold"), in_process(args, "warm")) for _ in range(args.rounds)]
    result = {
        **saved,
        "tokens": args.tokens,
        "ttft": statistics.median(cold["ttft"] for cold, _ in rounds),
        "load": statistics.median(warm["load"] for _, warm in rounds),
        "ttft_with_snapshot": statistics.median(warm["ttft"] for _, warm in rounds),
        "ratio": statistics.median(cold["ttft"] / warm["ttft"] for cold, warm in rounds),
        "ratio_with_load": statistics.median(
            cold["ttft"] / (warm["load"] + warm["ttft"]) for cold, warm in rounds
        ),
    }
    print(
        f"a prompt of {args.tokens} + {QUESTION} tokens; snapshot of {saved['bytes'] / 1e6:.1f} MB, "
        f"saved in {saved['save']:.2f} s"
    )
    print(f"first token, computed        {result['ttft']:8.3f} s")
    print(f"snapshot loaded              {result['load']:8.3f} s")
    ratios = f"{result['ratio']:.1f}x; with the loading {result['ratio_with_load']:.1f}x"
    print(f"first token, from snapshot   {result['ttft_with_snapshot']:8.3f} s   {ratios}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
