"""Memory of published shapes at q4 on the CPU: what `inspect` predicts, and what a process takes that loads
and answers.

    python benchmarks/memory.py [SHAPE …] [--tokens 4096] [--json FILE]   all up to 4 billion weights

For each shape: random weights (`nearfar synth`), a q4 build with steps of one row and of the most, then a
process that loads it with a cache of that length, fills the cache, and looks at its resident set before and
after. The tokenizer, which is the same on every device and not in the prediction, is measured and taken off.
Checkpoint and artifact are deleted.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LARGEST = 4.1e9  # bytes of weights


def build(shape: str, folder: Path) -> Path:
    """The q4 artifact of a shape, for the CPU."""
    from nearfar.build.pipeline import BuildOptions
    from nearfar.build.pipeline import build as run
    from nearfar.build.synth import synth_checkpoint
    from nearfar.format.sizes import MAX_STEP
    from nearfar.kernels.buckets import Buckets

    checkpoint = folder / "checkpoint"
    synth_checkpoint(shape, checkpoint)
    (made,) = run(
        BuildOptions(str(checkpoint), folder / "out", ("cpu",), "q4", buckets=Buckets((1, MAX_STEP), (1,)))
    )
    shutil.rmtree(checkpoint)
    return made


def return_freed_memory() -> None:
    """Return memory that is free to the system, where the C library keeps it (glibc)."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def load(artifact: Path, tokens: int) -> dict[str, Any]:
    """Load an artifact in its own process: the bytes that the engine reports, and by how much the resident
    set grew.
    """
    import psutil

    from nearfar.cli.inspect import memory_for
    from nearfar.edge_runtime import Engine, SamplingParams
    from nearfar.edge_runtime.artifact.budget import kv_bytes
    from nearfar.edge_runtime.artifact.reader import Artifact
    from nearfar.edge_runtime.executors.cpu import DEVICE
    from nearfar.edge_runtime.text.codec import TextCodec

    opened = Artifact.open(artifact)
    program, process = opened.able_programs(DEVICE.probe(None))[0], psutil.Process()
    # A codec takes memory that was freed before, if the process still has it. So the process returns such
    # memory before this codec, which is dropped again, and before the engine opens its own.
    return_freed_memory()
    start = process.memory_info().rss
    codec = TextCodec.open(opened)
    tokenizer = process.memory_info().rss - start
    del codec
    return_freed_memory()
    before = process.memory_info().rss
    with Engine.load(artifact, kv_memory=kv_bytes(opened.manifest, program, tokens)) as engine:
        room = min(engine.context, tokens)
        list(engine.generate([5] * (room - 2), SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)))
        held = engine.asynchronous.core.executor.memory_used()
        after = process.memory_info().rss
    return {
        "context": room,
        "predicted": memory_for(opened, program, room),
        "held": held,
        "tokenizer": tokenizer,
        "resident": after - before - tokenizer,
    }


def main() -> None:
    """Measure the shapes, print a table."""
    from nearfar.build.synth import published, shape_names

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="*")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        print(json.dumps(load(args.load, args.tokens)))
        return
    sizes = {name: sum(tensor.size for tensor in published(name).tensors.values()) for name in shape_names()}
    names = args.shapes or sorted(
        (name for name, size in sizes.items() if size <= LARGEST), key=sizes.__getitem__
    )
    rows = []
    print(
        f"{'shape':18} {'context':>8} {'tokenizer':>10} {'predicted':>10} {'held':>8} {'resident':>9}"
        "  held/predicted  resident/predicted"
    )
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            artifact = build(name, Path(folder))
            command = [sys.executable, __file__, "--load", str(artifact), "--tokens", str(args.tokens)]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        rows.append({"shape": name, **found})
        megabytes = [found[key] / 1e6 for key in ("tokenizer", "predicted", "held", "resident")]
        ratios = [found[key] / found["predicted"] for key in ("held", "resident")]
        print(
            f"{name:18} {found['context']:8} {megabytes[0]:10.1f} {megabytes[1]:10.1f} {megabytes[2]:8.1f}"
            f" {megabytes[3]:9.1f}"
            f"  {ratios[0]:14.3f}  {ratios[1]:18.3f}",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
