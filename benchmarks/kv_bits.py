"""A KV cache of 8 and of 4 bits beside one of float16 on the CPU: decode at long contexts, and memory.

    python benchmarks/kv_bits.py [--shape smollm2-135m] [--threads 2] [--rounds 3] [--at 512,2048,6000]

Random weights (`nearfar synth`) at q4, one artifact with a program for each cache. Each round measures the
caches in turn; the table gives the medians, and the medians of the rounds' ratios to float16.
`--cpu-time`: processor time on one thread instead, for machines that others use too.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from cpu import ours

BITS = (16, 8, 4)


def build(shape: str, folder: Path) -> Path:
    """The artifact, for this machine's processor."""
    from nearfar.build.pipeline import BuildOptions
    from nearfar.build.pipeline import build as run
    from nearfar.build.synth import synth_checkpoint
    from nearfar.kernels.buckets import Buckets

    synth_checkpoint(shape, folder / "checkpoint")
    options = BuildOptions(
        str(folder / "checkpoint"), folder / "out", ("cpu",), "q4", cpu_features=("native",),
        buckets=Buckets((1, 256), (1,)), kv_bits=BITS,
    )  # fmt: skip
    return run(options)[0]


def main() -> None:
    """Measure and print."""
    from nearfar.edge_runtime.artifact.budget import kv_bytes
    from nearfar.edge_runtime.artifact.reader import Artifact
    from nearfar.edge_runtime.executors.cpu import DEVICE

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at", default="512,2048,6000")
    parser.add_argument("--cpu-time", action="store_true")
    given = parser.parse_args()
    positions = [int(each) for each in given.at.split(",")]
    clock = time.process_time if given.cpu_time else time.perf_counter
    with tempfile.TemporaryDirectory() as name:
        path = build(given.shape, Path(name))
        threads = 1 if given.cpu_time else given.threads
        rounds = [
            {bits: ours(path, threads, clock, positions, bits) for bits in BITS} for _ in range(given.rounds)
        ]
        opened = Artifact.open(path)
        print(f"{given.shape}, q4, {threads} threads; tokens/s, in brackets beside float16")
        for bits in BITS:
            (program, *_) = opened.able_programs(DEVICE.probe(None), kv_bits=bits)
            megabytes = kv_bytes(opened.manifest, program, positions[-1]) / 1e6
            cells = [f"{program.kv_dtype:>8}: {megabytes:8.1f} MB at {positions[-1]}"]
            for figure in ("prefill", *(f"decode at {position}" for position in positions)):
                own = statistics.median(each[bits][figure] for each in rounds)
                ratio = statistics.median(each[bits][figure] / each[16][figure] for each in rounds)
                cells.append(f"{figure} {own:.1f} ({ratio:.2f})")
            print("  ".join(cells))


if __name__ == "__main__":
    main()
