"""CPU decode and prefill against llama.cpp (Q4_0 or Q4_K_M with flash attention, same shape, same threads)
and against memory bandwidth; and the most memory that each process had.

    python benchmarks/cpu.py [--shape smollm2-135m] [--threads 2] [--rounds 5] [--at 512,2048]
    python benchmarks/cpu.py artifact --checkpoint synth     the same for what is there already
    python benchmarks/cpu.py artifact --gguf model.gguf      both read the bytes of one file

Each round measures one runtime in a process of its own, then the other: what else the machine does falls on
both. The table gives medians and the median of the rounds' ratios. `--cpu-time` measures processor time on
one thread instead, for machines that others use too. The peer: pip install llama-cpp-python gguf, into any
environment; name its interpreter with --peer-python.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

GGUF_MODEL = Path(__file__).parent / "peers" / "gguf_model.py"
INSTALL = (
    "the peer needs llama-cpp-python and gguf: python -m venv peer && peer/bin/pip install llama-cpp-python "
    "gguf, then --peer-python peer/bin/python"
)
PREFILL, DECODE, LARGEST = 512, 48, 256
"""Tokens of the prompt, single tokens after it, and rows of a step."""


def rates(step: Any, vocab: int, clock: Any, positions: Sequence[int]) -> dict[str, float]:
    """Tokens per second of a prompt of PREFILL tokens, and of DECODE single tokens from each position on.

    A round before them warms up.

    `step(tokens, position)` computes tokens from a position on; positions ascend.
    """
    tokens = np.random.default_rng(0).integers(0, vocab, positions[-1]).tolist()
    found: dict[str, float] = {}
    for _ in range(2):
        start, done = clock(), 0
        step(tokens[:PREFILL], 0)
        found["prefill"] = PREFILL / (clock() - start)
        done = PREFILL
        for position in positions:
            if position > done:
                step(tokens[done:position], done)
            start = clock()
            for i in range(DECODE):
                step([5], position + i)
            found[f"decode at {position}"] = DECODE / (clock() - start)
            done = position + DECODE
    return found


def ours(
    artifact: Path, threads: int, clock: Any, positions: Sequence[int], kv_bits: int | None = None
) -> dict[str, float]:
    """Rates of the artifact through CpuExecutor, each step followed by greedy sampling and reading the
    token; and once more with tokens drawn at temperature 0.8, top-p 0.95.
    """
    from nearfar.edge_runtime.artifact.finder import find_artifact
    from nearfar.edge_runtime.artifact.reader import Artifact
    from nearfar.edge_runtime.devices import Settings
    from nearfar.edge_runtime.executors.cpu import DEVICE
    from nearfar.edge_runtime.executors.cpu.executor import CpuExecutor
    from nearfar.format.buffers import page_table
    from nearfar.format.sampler import COLUMNS, SampleF32, SampleI32
    from nearfar.format.sizes import MAX_ROWS

    opened = Artifact.open(find_artifact(artifact, "cpu"))
    manifest = opened.manifest
    context = positions[-1] + DECODE
    program = opened.able_programs(DEVICE.probe(None), kv_bits=kv_bits)[0]
    pages = -(-context // manifest.cache.page_size)
    context = pages * manifest.cache.page_size
    settings = Settings((pages,) * len(manifest.groups), context, threads)
    executor = CpuExecutor(opened, program, settings)
    for group in range(len(manifest.groups)):
        table = np.arange(pages, dtype=np.int32).reshape(1, pages)
        for slot in range(manifest.cache.slots):
            executor.write(page_table(group), table, slot)
    buckets = sorted(bucket.size for bucket in program.functions["step"])
    drawn = np.zeros((MAX_ROWS, COLUMNS), np.int32)
    drawn[:, SampleI32.FEED] = -1
    executor.write("sample_i32", drawn)
    shape = np.zeros((MAX_ROWS, COLUMNS), np.float32)
    shape[:, SampleF32.TEMPERATURE], shape[:, SampleF32.TOP_P] = 0.8, 0.95
    executor.write("sample_f32", shape)
    sampler = "greedy"

    def step(tokens: list[int], position: int) -> None:
        for start in range(0, len(tokens), LARGEST):
            one_step(tokens[start : start + LARGEST], position + start)

    def one_step(tokens: list[int], position: int) -> None:
        count = len(tokens)
        size = next(bucket for bucket in buckets if bucket >= count)
        tokens = tokens + [0] * (size - count)
        executor.write("tokens", np.array(tokens, np.int32))
        places = np.arange(position, position + size, dtype=np.int32)
        executor.write("positions", np.minimum(places, position + count - 1))
        executor.write("logit_rows", np.full(MAX_ROWS, count - 1, np.int32))
        executor.run("step", size)
        executor.run(sampler, 1)
        executor.fetch("sampled", 1)()

    found_rates = rates(step, manifest.model.vocab_size, clock, positions)
    # In turn, from the same position: a sampler costs little beside what a machine's speed varies.
    seconds: dict[str, list[float]] = {"greedy": [], "sample": []}
    for _ in range(5):
        for sampler in seconds:
            start = clock()
            for i in range(DECODE):
                step([5], PREFILL + i)
            seconds[sampler].append(clock() - start)
    share = statistics.median(seconds["greedy"]) / statistics.median(seconds["sample"])
    counts = {param.name: param.n * max(param.k, 1) for param in manifest.step.parameters}
    chosen = sum(count * manifest.step.share(name, 1) for name, count in counts.items())
    return {**found_rates, "sampled": share, "read": chosen / sum(counts.values())}


def peer(model: Path, threads: int, clock: Any, positions: Sequence[int]) -> dict[str, float]:
    """Rates of llama.cpp on a GGUF file."""
    from llama_cpp import Llama

    llama = Llama(
        str(model),
        n_ctx=positions[-1] + DECODE,
        n_threads=threads,
        n_threads_batch=threads,
        n_batch=512,
        n_ubatch=512,
        flash_attn=True,
        verbose=False,
    )

    def step(tokens: list[int], position: int) -> None:
        llama.n_tokens = position
        llama.eval(tokens)

    return rates(step, llama.n_vocab(), clock, positions)


def read_bandwidth(threads: int, clock: Any) -> float:
    """GB/s of summing 512 MB with NumPy on this many threads: the bound of streaming weights."""
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
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from benchmarks.shared.engines import artifact_of  # imports nearfar, which the peer's Python lacks

    artifact = artifact_of(folder, shape, "cpu")
    return folder / "checkpoint", artifact


def built_of(artifact: Path, model: Path) -> None:
    """End the script unless an artifact was built of a GGUF file with these bytes."""
    from nearfar.build.weights.opening import open_checkpoint

    stated = json.loads((artifact / "manifest.json").read_text(encoding="utf-8"))["provenance"]
    digest = open_checkpoint(model).sha256()
    if stated["checkpoint_sha256"] != digest:
        raise SystemExit(
            f"{artifact} was built of the checkpoint {stated['checkpoint']} with the digest "
            f"{stated['checkpoint_sha256']}, and the digest of {model} is {digest}: "
            "build an artifact of this file"
        )


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
    print(f"{'':16}{'nearfar':>12}{'llama.cpp':>12}{'ratio':>8}   tokens/s, {result['measure']}")
    for kind, row in result["rates"].items():
        print(f"{kind:16}{row['nearfar']:12.1f}{row['llama.cpp']:12.1f}{row['ratio']:8.2f}")
    print(f"decode of drawn tokens is {result['sampled']:.3f} of greedy's")
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
    parser.add_argument(
        "--gguf", type=Path, help="instead of --checkpoint: the file that the artifact was built of"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--at",
        default="512,2048",
        help="positions from which single tokens are measured, ascending, from 512 on",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--peer-quant", choices=["q4_0", "q4_k_m"], default="q4_0")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=["ours", "peer"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    positions = [int(each) for each in args.at.split(",")]
    if positions != sorted(positions) or positions[0] < PREFILL:
        parser.error(f"--at is {args.at}: ascending positions from {PREFILL} on")
    if args.one is not None:
        measure = ours if args.one == "ours" else peer
        found = measure(args.artifact, args.threads, clock, positions)
        found["peak MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
        print(json.dumps(found))
        return
    models = [model for model in (args.checkpoint, args.gguf) if model is not None]
    if len(models) != (args.artifact is not None):
        parser.error(
            "an artifact goes together with --checkpoint, which gives the peer's model its shape, or with "
            "--gguf, which is the peer's model"
        )
    threads = 1 if args.cpu_time else args.threads
    common = ["--threads", str(threads), "--at", args.at, *(["--cpu-time"] if args.cpu_time else [])]
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        if args.artifact is None:
            args.checkpoint, args.artifact = prepare(Path(folder), args.shape)
        root = args.artifact / "cpu" if (args.artifact / "cpu").exists() else args.artifact
        model = str(args.gguf or f"{folder}/model.gguf")
        if args.gguf:
            built_of(root, args.gguf)
        else:
            quant = ["--quant", args.peer_quant]
            in_process(args.peer_python, str(GGUF_MODEL), str(args.checkpoint), model, *quant)
        for _ in range(args.rounds):
            mine = in_process(sys.executable, __file__, str(args.artifact), "--one", "ours", *common)
            rounds.append((mine, in_process(args.peer_python, __file__, model, "--one", "peer", *common)))
        weights = json.loads((root / "manifest.json").read_text())["weights"]["bytes"]
    result: dict[str, Any] = {
        "threads": threads,
        "measure": f"{threads} threads, {'processor' if args.cpu_time else 'wall'} time",
    }
    result["rates"] = {
        kind: {
            "nearfar": statistics.median(a[kind] for a, _ in rounds),
            "llama.cpp": statistics.median(b[kind] for _, b in rounds),
            "ratio": statistics.median(a[kind] / b[kind] for a, b in rounds),
        }
        for kind in rounds[0][1]
    }
    result["sampled"] = statistics.median(mine["sampled"] for mine, _ in rounds)
    weights *= rounds[0][0]["read"]  # of experts those that a token has chosen
    result["rounds"] = [{"nearfar": mine, "llama.cpp": other} for mine, other in rounds]
    result["weights_gb_per_s"] = weights * result["rates"][f"decode at {positions[0]}"]["nearfar"] / 1e9
    result["bandwidth_gb_per_s"] = read_bandwidth(threads, clock)
    report(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
