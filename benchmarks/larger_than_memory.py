"""Decode of a model with experts on the CPU if memory holds only a part of its weights.

    python benchmarks/larger_than_memory.py [--layers 10] [--share 0.5] [--rounds 3]
    python benchmarks/larger_than_memory.py ARTIFACT        the same for an artifact that is there already

OLMoE's shape, cut to some layers, with random weights (Q4_0). Each round decodes in two processes: one has
the machine's memory, the other a control group (v1 or v2) with a share of the weights' bytes beside what the
runtime itself takes. The artifact's files leave the page cache before. Tokens of random weights choose their
experts evenly; a trained model returns to the same experts more often, and reads less. Needs Linux, leave
to make control groups, and gguf (pip install 'nearfar[bench]').
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHAPE = "olmoe-1b-7b"
CONTEXT = 1024
WARM = 32
"""Tokens before those that are measured."""


def make(folder: Path, layers: int) -> Path:
    """The artifact of the shape with some of its layers."""
    from benchmarks.peers.gguf_model import write_gguf
    from benchmarks.shared.engines import NEARFAR
    from nearfar.build.synth import published, write_small_files

    shape = published(SHAPE)
    shape = dataclasses.replace(shape, config={**shape.config, "num_hidden_layers": layers})
    write_small_files(shape, folder)
    model, out = folder / "model.gguf", folder / "artifact"
    write_gguf(folder, model)
    build = ["build", str(model), "--target", "cpu", "--cpu-features", "native", "-o", str(out)]
    subprocess.run([*NEARFAR, *build], check=True)
    model.unlink()
    return out / "cpu"


def decode(artifact: Path, threads: int, tokens: int, seed: int) -> dict[str, float]:
    """Tokens per second, the megabytes that each token read from the disk, and the bytes of this process that
    are in memory and in no file.
    """
    import numpy as np
    import psutil

    from nearfar.edge_runtime import Engine, SamplingParams
    from nearfar.edge_runtime.artifact.budget import kv_bytes
    from nearfar.edge_runtime.artifact.reader import Artifact
    from nearfar.edge_runtime.executors.cpu import DEVICE

    opened = Artifact.open(artifact)
    program = opened.able_programs(DEVICE.probe(None))[0]
    kv_memory = kv_bytes(opened.manifest, program, CONTEXT)
    params = SamplingParams(temperature=1.0, max_tokens=WARM + tokens, ignore_eos=True, seed=seed)
    process = psutil.Process()
    with Engine.load(artifact, threads=threads, kv_memory=kv_memory) as engine:
        prompt = np.random.default_rng(seed).integers(0, engine.manifest.model.vocab_size, 16).tolist()
        times, read = [], []
        for _ in engine.generate(prompt, params):
            times.append(time.perf_counter())
            read.append(process.io_counters().read_bytes)
        status = Path("/proc/self/status").read_text(encoding="ascii")
    own = sum(int(count) for count in re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", status))
    return {
        "tokens/s": tokens / (times[-1] - times[WARM - 1]),
        "MB read a token": (read[-1] - read[WARM - 1]) / tokens / 1e6,
        "own": 1024 * own,
    }


def forget(artifact: Path) -> None:
    """Drop the artifact's files from the page cache."""
    os.sync()
    for path in artifact.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def measured(options: list[str], group: Path | None = None) -> dict[str, float]:
    """Decode in a process of its own, in a control group if one is given."""
    command = [sys.executable, __file__, *options, "--one"]
    if group is not None:
        command += ["--group", str(group)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path, nargs="?")
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--share", type=float, default=0.5, help="of the weights' bytes that fit")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--group", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        if args.group is not None:
            (args.group / "cgroup.procs").write_text(str(os.getpid()))
        print(json.dumps(decode(args.artifact, args.threads, args.tokens, args.seed)))
        return
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.support.control_groups import control_group

    with control_group(1 << 30) as group:
        if group is None:
            raise SystemExit("skipped: no control group can be made here (as root, on Linux)")
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        artifact = args.artifact or make(Path(folder), args.layers)
        weights = json.loads((artifact / "manifest.json").read_text(encoding="utf-8"))["weights"]["bytes"]
        for seed in range(args.rounds):
            options = [str(artifact), "--threads", str(args.threads), "--tokens", str(args.tokens)]
            options += ["--seed", str(seed)]
            forget(artifact)
            whole = measured(options)
            forget(artifact)
            with control_group(int(args.share * weights + max(whole["own"] - weights, 0))) as group:
                rounds.append((whole, measured(options, group)))
    print(f"{'':18}{'all in memory':>14}{f'{args.share:.2f} in memory':>16}{'ratio':>8}")
    for name in ("tokens/s", "MB read a token"):
        one, other = (statistics.median(pair[i][name] for pair in rounds) for i in (0, 1))
        ratio = f"{statistics.median(pair[1][name] / pair[0][name] for pair in rounds):8.2f}" if one else ""
        print(f"{name:18}{one:14.1f}{other:16.1f}{ratio}")
    if args.json:
        args.json.write_text(json.dumps(rounds, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
