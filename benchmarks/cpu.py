"""CPU decode and prefill against llama.cpp (Q4_0, same shape, same threads) and against memory bandwidth.

    python benchmarks/cpu.py [--shape smollm2-135m] [--threads 2] [--rounds 5] [--json FILE]
    python benchmarks/cpu.py artifact --checkpoint synth     the same for what is there already

Each round measures one runtime in a process of its own, then the other: what else the machine does falls on
both. The table gives medians and the median of the rounds' ratios. `--cpu-time` measures processor time on
one thread instead, for machines that others use too. The peer: pip install llama-cpp-python gguf, into any
environment; name its interpreter with --peer-python.
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
from typing import Any

import numpy as np

GGUF_MODEL = Path(__file__).parent / "peers" / "gguf_model.py"
INSTALL = (
    "the peer needs llama-cpp-python and gguf: python -m venv peer && peer/bin/pip install llama-cpp-python "
    "gguf, then --peer-python peer/bin/python"
)
PREFILL, DECODE = 256, 48


def rates(step: Any, vocab: int, clock: Any) -> dict[str, float]:
    """Tokens per second of one prompt of PREFILL tokens and DECODE single tokens after it, after a round
    to warm up.
    """
    tokens = np.random.default_rng(0).integers(0, vocab, PREFILL).tolist()
    for _ in range(2):
        start = clock()
        step(tokens, 0)
        middle = clock()
        for i in range(DECODE):
            step([5], PREFILL + i)
        end = clock()
    return {"prefill": PREFILL / (middle - start), "decode": DECODE / (end - middle)}


def ours(artifact: Path, threads: int, clock: Any) -> dict[str, float]:
    """Rates of the artifact through CpuExecutor, each step followed by greedy sampling and reading the
    token.
    """
    from nearfar.edge_runtime.artifact.finder import find_artifact
    from nearfar.edge_runtime.artifact.reader import Artifact
    from nearfar.edge_runtime.devices import Settings
    from nearfar.edge_runtime.executors.cpu.executor import CpuExecutor
    from nearfar.format.buffers import page_table
    from nearfar.format.sampler import COLUMNS, SampleI32
    from nearfar.format.sizes import MAX_ROWS

    opened = Artifact.open(find_artifact(artifact, "cpu"))
    manifest = opened.manifest
    pages = 512 // manifest.cache.page_size
    settings = Settings((pages,) * len(manifest.groups), 512, threads)
    executor = CpuExecutor(opened, manifest.programs[0], settings)
    for group in range(len(manifest.groups)):
        table = np.arange(pages, dtype=np.int32).reshape(1, pages)
        for slot in range(manifest.cache.slots):
            executor.write(page_table(group), table, slot)
    drawn = np.zeros((MAX_ROWS, COLUMNS), np.int32)
    drawn[:, SampleI32.FEED] = -1
    executor.write("sample_i32", drawn)

    def step(tokens: list[int], position: int) -> None:
        count = len(tokens)
        executor.write("tokens", np.array(tokens, np.int32))
        executor.write("positions", np.arange(position, position + count, dtype=np.int32))
        executor.write("logit_rows", np.array([count - 1], np.int32))
        executor.run("step", count)
        executor.run("greedy", 1)
        executor.fetch("sampled", 1)()

    return rates(step, manifest.model.vocab_size, clock)


def peer(model: Path, threads: int, clock: Any) -> dict[str, float]:
    """Rates of llama.cpp on a GGUF file."""
    from llama_cpp import Llama

    llama = Llama(
        str(model),
        n_ctx=512,
        n_threads=threads,
        n_threads_batch=threads,
        n_batch=512,
        n_ubatch=512,
        verbose=False,
    )

    def step(tokens: list[int], position: int) -> None:
        if position == 0:
            llama.reset()
        llama.eval(tokens)

    return rates(step, llama.n_vocab(), clock)


def read_bandwidth(threads: int, clock: Any) -> float:
    """GB/s of summing 512 MB with NumPy on so many threads: what streaming weights can reach."""
    from concurrent.futures import ThreadPoolExecutor

    parts = [np.ones(2**26 // threads, np.float64) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            start = clock()
            list(pool.map(np.max, parts))
            best = max(best, sum(part.nbytes for part in parts) / (clock() - start) / 1e9)
    return best


def prepare(folder: Path, shape: str) -> tuple[Path, Path]:
    """A checkpoint of a shape with random weights, and its q4 artifact."""
    checkpoint, artifact = folder / "checkpoint", folder / "artifact"
    nearfar = [sys.executable, "-m", "nearfar"]
    subprocess.run([*nearfar, "synth", shape, "-o", str(checkpoint)], check=True)
    command = [*nearfar, "build", str(checkpoint), "--target", "cpu", "--quant", "q4", "-o", str(artifact)]
    subprocess.run(command, check=True)
    return checkpoint, artifact


def in_process(python: str, *args: str) -> dict[str, float]:
    """Run one measurement in a process of its own."""
    done = subprocess.run([python, *args], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(args)} failed ({INSTALL}):\n{done.stderr[-2000:]}")
    if not done.stdout.startswith("{"):
        return {}
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def report(result: dict[str, Any]) -> None:
    """Print the table."""
    print(f"{'':10}{'nearfar':>12}{'llama.cpp':>12}{'ratio':>8}   tokens/s, {result['measure']}")
    for kind in ("prefill", "decode"):
        row = result[kind]
        print(f"{kind:10}{row['nearfar']:12.1f}{row['llama.cpp']:12.1f}{row['ratio']:8.2f}")
    print(
        f"decode reads {result['weights_gb_per_s']:.1f} GB/s of weights; memory gives "
        f"{result['bandwidth_gb_per_s']:.1f} GB/s"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path, nargs="?")
    parser.add_argument(
        "--shape",
        default="smollm2-135m",
        help="a shape of `nearfar synth`, built to q4, where no artifact is given",
    )
    parser.add_argument("--checkpoint", type=Path, help="for the shape of the peer's model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=["ours", "peer"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    if args.one is not None:
        print(json.dumps((ours if args.one == "ours" else peer)(args.artifact, args.threads, clock)))
        return
    if (args.artifact is None) != (args.checkpoint is None):
        parser.error(
            "an artifact and --checkpoint go together: the checkpoint gives the peer's model its shape"
        )
    threads = 1 if args.cpu_time else args.threads
    common = ["--threads", str(threads), *(["--cpu-time"] if args.cpu_time else [])]
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        if args.artifact is None:
            args.checkpoint, args.artifact = prepare(Path(folder), args.shape)
        model = f"{folder}/model.gguf"
        in_process(args.peer_python, str(GGUF_MODEL), str(args.checkpoint), model)
        for _ in range(args.rounds):
            mine = in_process(sys.executable, __file__, str(args.artifact), "--one", "ours", *common)
            rounds.append((mine, in_process(args.peer_python, __file__, model, "--one", "peer", *common)))
        root = args.artifact / "cpu" if (args.artifact / "cpu").exists() else args.artifact
        weights = json.loads((root / "manifest.json").read_text())["weights"]["bytes"]
    result: dict[str, Any] = {
        "threads": threads,
        "measure": f"{threads} threads, {'processor' if args.cpu_time else 'wall'} time",
    }
    for kind in ("prefill", "decode"):
        result[kind] = {
            "nearfar": statistics.median(a[kind] for a, _ in rounds),
            "llama.cpp": statistics.median(b[kind] for _, b in rounds),
            "ratio": statistics.median(a[kind] / b[kind] for a, b in rounds),
        }
    result["weights_gb_per_s"] = weights * result["decode"]["nearfar"] / 1e9
    result["bandwidth_gb_per_s"] = read_bandwidth(threads, clock)
    report(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
