"""The vulkan executor against the webgpu one (through wgpu) on the same device, and what a decode step costs
the host.

    python benchmarks/vulkan_runtime.py [--shape smollm2-135m] [--device vulkan:0] [--rounds 5] [--json FILE]
    python benchmarks/vulkan_runtime.py OUT      OUT holds vulkan/ and webgpu/ of one model

Rounds alternate between the two, so that what else the machine does falls on both; the table gives medians of
tokens/s, and the median of the rounds' ratios. The host's share of a decode step is the processor time of the
thread that enqueues steps and reads results (on lavapipe other threads are the device), and, for vulkan, wall
time less the time in vkWaitSemaphores. `--cpu-time` counts processor time instead of wall time: for lavapipe
on machines that others use too. wgpu takes the adapter that it prefers: on a machine with several GPUs, check
that both lines name the same device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nearfar.edge_runtime import Engine
from nearfar.edge_runtime.devices import device
from nearfar.edge_runtime.engine.steps import StepWork, Write, launch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.shared.engines import artifact_of, rates

PREFILL, DECODE, HOST_STEPS = 256, 64, 200


def host_time(engine: Engine, steps: int) -> dict[str, float]:
    """Milliseconds of host time for a decode step, with one step enqueued ahead as the engine does; the
    engine must be idle.
    """
    executor: Any = engine.asynchronous.core.executor
    ints = np.full((16, 8), -1, np.int32)
    ints[0, 0], ints[0, 5] = 0, 0

    def step(position: int) -> Any:
        writes = [
            Write("positions", np.array([position], np.int32)),
            Write("slots", np.zeros(1, np.int32)),
            Write("logit_rows", np.zeros(16, np.int32)),
            Write("sample_i32", ints),
        ]
        return launch(executor, StepWork(1, (), writes, sampler="greedy", sampler_size=1, sampled=1))

    step(0).read()
    wall, cpu, waited = time.perf_counter(), time.thread_time(), getattr(executor, "waited", None)
    before = step(0)
    for position in range(1, steps):
        after = step(position % 64)
        before.read()
        before = after
    before.read()
    wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
    found = {"step": wall / steps * 1e3, "host_cpu": cpu / steps * 1e3}
    if waited is not None:
        found["host_wall"] = (wall - (executor.waited - waited)) / steps * 1e3
    return found


def compare(
    root: Path, device: str, precision: str, rounds: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """Medians of both executors with one precision."""
    options: dict[str, Any] = {"precision": precision, "kv_memory": "256MB", "verify": False}
    names = ("vulkan", "webgpu")
    with (
        Engine.load(root / "vulkan", device=device, **options) as vulkan,
        Engine.load(root / "webgpu", device="webgpu", **options) as webgpu,
    ):
        engines = dict(zip(names, (vulkan, webgpu), strict=True))
        decode = min(DECODE, vulkan.context - PREFILL)
        for engine in engines.values():
            rates(engine, 0, PREFILL, decode, clock)  # this run compiles the kernels
        seen: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for seed in range(1, rounds + 1):
            for name in names if seed % 2 else names[::-1]:
                made = rates(engines[name], seed, PREFILL, decode, clock)
                seen[name].append(made | host_time(engines[name], HOST_STEPS))
    result: dict[str, Any] = {
        name: {key: statistics.median(r[key] for r in found) for key in found[0]}
        for name, found in seen.items()
    }
    result["ratio"] = {
        key: statistics.median(a[key] / b[key] for a, b in zip(seen["vulkan"], seen["webgpu"], strict=True))
        for key in ("prefill", "decode")
    }
    return result


def report(result: dict[str, Any]) -> None:
    """Print the table."""
    print(f"vulkan: {result['devices']['vulkan']}\nwebgpu: {result['devices']['webgpu']}")
    for precision, found in result["precisions"].items():
        print(f"{precision:10}{'vulkan':>12}{'webgpu':>12}{'ratio':>8}   tokens/s, {result['measure']}")
        for kind in ("prefill", "decode"):
            ours, theirs = found["vulkan"][kind], found["webgpu"][kind]
            print(f"{kind:10}{ours:12.1f}{theirs:12.1f}{found['ratio'][kind]:8.2f}")
        for name in ("vulkan", "webgpu"):
            one = found[name]
            wall = f", {one['host_wall']:.3f} ms of wall time outside waiting" if "host_wall" in one else ""
            print(
                f"{name}: a decode step {one['step']:.2f} ms; of the host {one['host_cpu']:.3f} ms of "
                f"processor time{wall}"
            )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path, nargs="?")
    parser.add_argument(
        "--shape", default="smollm2-135m", help="a shape of `nearfar synth`, where no artifact is given"
    )
    parser.add_argument("--device", default="vulkan", help="vulkan:N or vulkan:NAME")
    parser.add_argument("--precision", choices=["f16", "f32"], help="only this one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--cpu-time", action="store_true", help="tokens per second of the process's processor time"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    with tempfile.TemporaryDirectory() as folder:
        root = args.artifact or artifact_of(Path(folder), args.shape, "vulkan,webgpu")
        names = {name: device(name).list()[0].name for name in ("vulkan", "webgpu")}
        wanted = [args.precision] if args.precision else ["f16", "f32"]
        precisions = {p: compare(root, args.device, p, args.rounds, clock) for p in wanted}
    result = {
        "measure": "processor time" if args.cpu_time else "wall time",
        "devices": names,
        "precisions": precisions,
    }
    report(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
