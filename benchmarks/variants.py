"""Each program of a GPU artifact on one device, in turn, beside the one that the runtime chose by itself.

    python benchmarks/variants.py [--device vulkan] [--shape smollm2-135m] [--rounds 5] [--json FILE]
    python benchmarks/variants.py --artifact OUT/vulkan --device vulkan:1

An artifact has a program for each class of devices (docs/decisions/0015); the runtime takes one of the
device's class, by a short trial. This times all that the device can run. Rounds alternate between the
programs, so that what else the machine does falls on all of them; the table gives medians of tokens/s, and
what part of the quickest program's speed the chosen one has. On lavapipe it should be of class software.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from nearfar.edge_runtime import Engine
from nearfar.edge_runtime.artifact.finder import by_target
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.devices import device, parse_device
from nearfar.errors import DeviceError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.shared.engines import artifact_of, rates

PREFILL, DECODE = 256, 64
KINDS = ("prefill", "decode")


def able(artifact: Path, name: str) -> list[str]:
    """Programs that the device can run."""
    kind, which = parse_device(name)
    return [each.name for each in Artifact.open(artifact).able_programs(device(kind).probe(which))]


def compare(
    artifact: Path, name: str, rounds: int, prefill: int, decode: int, cpu_time: bool
) -> dict[str, Any]:
    """Medians of tokens per second by program, and the program that was chosen."""
    options: dict[str, Any] = {"device": name, "kv_memory": "256MB", "verify": False}
    clock = time.process_time if cpu_time else time.perf_counter
    with Engine.load(artifact, **options) as engine:
        choice = engine.asynchronous.core.choice
    seen: dict[str, list[dict[str, float]]] = {}
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for program in able(artifact, name):
            try:
                engine = stack.enter_context(Engine.load(artifact, program=program, **options))
                rates(engine, 0, prefill, decode)  # this run compiles the kernels
            except DeviceError as error:
                print(f"{program}: {error}", file=sys.stderr)
            else:
                engines[program] = engine
        for seed in range(1, rounds + 1):
            for program in list(engines)[:: 1 if seed % 2 else -1]:
                made = rates(engines[program], seed, prefill, decode, clock)
                seen.setdefault(program, []).append(made)
                print(f"round {seed}, {program}: {made}", file=sys.stderr, flush=True)
    programs = {
        program: {kind: statistics.median(one[kind] for one in found) for kind in KINDS}
        for program, found in seen.items()
    }
    best = {kind: max(found[kind] for found in programs.values()) for kind in KINDS}
    share = {kind: programs[choice.program][kind] / best[kind] for kind in KINDS}
    return {"programs": programs, "chosen": choice.program, "why": str(choice), "of_the_best": share}


def report(result: dict[str, Any]) -> None:
    """Print the table."""
    print(f"{'':24}{'prefill':>10}{'decode':>10}   tokens/s")
    for program, found in sorted(result["programs"].items(), key=lambda item: -item[1]["decode"]):
        mark = "  chosen" if program == result["chosen"] else ""
        print(f"{program:24}{found['prefill']:10.1f}{found['decode']:10.1f}{mark}")
    share = result["of_the_best"]
    of_best = ", ".join(f"{share[kind]:.2f} of the best {kind}" for kind in KINDS)
    print(f"chosen ({result['why']}): {of_best}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--artifact", type=Path, help="built from --shape if not given")
    parser.add_argument("--shape", default="smollm2-135m", help="a shape of `nearfar synth`")
    parser.add_argument("--device", default="vulkan", help="vulkan, webgpu, vulkan:N or vulkan:NAME")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefill", type=int, default=PREFILL)
    parser.add_argument("--decode", type=int, default=DECODE)
    parser.add_argument("--cpu-time", action="store_true", help="by processor time: for lavapipe")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kind, _ = parse_device(args.device)
    with tempfile.TemporaryDirectory() as folder:
        root = args.artifact or artifact_of(Path(folder), args.shape, kind)
        artifact = by_target(root)[kind]
        result = compare(artifact, args.device, args.rounds, args.prefill, args.decode, args.cpu_time)
    report(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
