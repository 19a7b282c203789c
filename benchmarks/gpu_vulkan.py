"""What a Vulkan GPU gives: copy bandwidth, and for each shape decode, prefill and the time to the first
token.

    python benchmarks/gpu_vulkan.py [--device vulkan:0] [--shapes smollm2-135m,qwen3-0.6b,llama-3.2-1b]
    [--rounds 5] [--json FILE]
    python benchmarks/gpu_vulkan.py --artifacts DIR       DIR/<shape> are built already (--target vulkan)

Weights are random, q4; speed does not depend on them. A decoded token reads all weights but an embedding of
its own, and the keys and values before it: those bytes over the time of a token, as a part of the copy
bandwidth (bytes read plus bytes written), say how much of the memory's speed decoding uses. All figures are
medians of the rounds; prompts are new in each, so that no prefix is in the cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from nearfar.edge_runtime import Engine
from nearfar.edge_runtime.artifact.budget import kv_bytes
from nearfar.edge_runtime.devices import parse_device
from nearfar.edge_runtime.executors.vulkan.blocks import Memory
from nearfar.edge_runtime.executors.vulkan.commands import Queue
from nearfar.edge_runtime.executors.vulkan.device import Gpu, gpus, open_device, select
from nearfar.format.manifest import Manifest, Program, Requires

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.shared.engines import artifact_of, rates

SHAPES = ("smollm2-135m", "qwen3-0.6b", "llama-3.2-1b")
PREFILL, DECODE = 512, 128
COPY_BYTES, COPIES = 256 << 20, 20


def copy_bandwidth(gpu: Gpu, rounds: int, size: int) -> float:
    """Bytes per second, read plus written, of copying within the device's memory."""
    device = open_device(gpu, Requires(()))
    memory, queue = Memory(device), Queue(device)
    try:
        source, target = memory.reserve([size, size], memory.kinds.large, False)
        seconds = []
        for _ in range(rounds + 1):
            commands = queue.once()
            for _ in range(COPIES):
                queue.copy(commands, (source.buffer, source.offset), (target.buffer, target.offset), size)
                queue.barrier(commands)
            queue.add_once(commands)
            start = time.perf_counter()
            queue.wait(queue.submit())
            seconds.append(time.perf_counter() - start)
        return 2 * size * COPIES / statistics.median(seconds[1:])  # the first one touches the memory
    finally:
        queue.close()
        memory.close()
        device.close()


def bytes_per_token(manifest: Manifest, program: Program, position: float) -> float:
    """Bytes that decoding one token at a position reads: weights, but of an untied embedding only a row;
    keys and values.
    """
    tensors = manifest.weights.tensors
    untied = any(tensor.name.startswith("lm_head.") for tensor in tensors)
    weights = sum(tensor.bytes for tensor in tensors if not (untied and tensor.name.startswith("embed.")))
    return weights + kv_bytes(manifest, program, round(position))


def measure(
    artifact: Path, device: str, precision: str | None, rounds: int, prefill: int, decode: int
) -> dict[str, Any]:
    """Medians of one model."""
    with Engine.load(artifact, device=device, precision=precision, verify=False) as engine:
        rates(engine, 0, prefill, decode)  # compiles
        seen = [rates(engine, seed, prefill, decode) for seed in range(1, rounds + 1)]
        executor = engine.asynchronous.core.executor
        ttft = statistics.median(prefill / one["prefill"] for one in seen)
        rate = statistics.median(one["decode"] for one in seen)
        program = next(p for p in engine.manifest.programs if p.name == executor.program_name)
        per_token = bytes_per_token(engine.manifest, program, prefill + decode / 2)
        return {
            "precision": executor.precision,
            "memory": executor.memory_used(),
            "decode": rate,
            "ttft": ttft,
            "prefill": prefill / ttft,
            "bytes_per_token": per_token,
            "bytes_per_second": per_token * rate,
        }


def report(result: dict[str, Any]) -> None:
    """Print the table."""
    bandwidth = result["copy_bytes_per_second"]
    print(f"{result['device']}: copies {bandwidth / 1e9:.1f} GB/s (read and written)")
    print(
        f"{'':14}{'decode':>10}{'GB/s':>8}{'of copy':>9}{'prefill':>10}{'TTFT':>9}   tokens/s; "
        f"{result['prefill']} tokens; ms"
    )
    for shape, one in result["shapes"].items():
        part = one["bytes_per_second"] / bandwidth
        print(
            f"{shape:14}{one['decode']:10.1f}{one['bytes_per_second'] / 1e9:8.1f}"
            f"{part:9.0%}{one['prefill']:10.1f}"
            f"{one['ttft'] * 1e3:9.1f}   {one['precision']}"
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="vulkan", help="vulkan:N or vulkan:NAME")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--precision", choices=["f16", "f32"])
    parser.add_argument("--artifacts", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefill", type=int, default=PREFILL)
    parser.add_argument("--decode", type=int, default=DECODE)
    parser.add_argument("--copy-bytes", type=int, default=COPY_BYTES)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    gpu = select(parse_device(args.device)[1], gpus())
    result: dict[str, Any] = {
        "device": gpu.name,
        "driver": gpu.driver,
        "prefill": args.prefill,
        "shapes": {},
        "copy_bytes_per_second": copy_bandwidth(gpu, args.rounds, args.copy_bytes),
    }
    for shape in args.shapes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            artifact = (
                args.artifacts / shape if args.artifacts else artifact_of(Path(folder), shape, "vulkan")
            )
            result["shapes"][shape] = measure(
                artifact, args.device, args.precision, args.rounds, args.prefill, args.decode
            )
    report(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
