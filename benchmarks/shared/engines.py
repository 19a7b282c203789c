"""Artifacts of a shape with random weights, and how fast an engine answers."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from nearfar.edge_runtime import Engine, SamplingParams

NEARFAR = [sys.executable, "-m", "nearfar"]


def artifact_of(folder: Path, shape: str, targets: str, *options: str) -> Path:
    """An artifact of a shape of `nearfar synth`, made in `folder`; speed does not depend on the weights."""
    checkpoint = folder / "checkpoint"
    subprocess.run([*NEARFAR, "synth", shape, "-o", str(checkpoint)], check=True)
    return built(folder, checkpoint, targets, *options)


def built(folder: Path, checkpoint: Path, targets: str, *options: str) -> Path:
    """The q4 artifact of a checkpoint, made in `folder`."""
    out = folder / "artifact"
    build = ["build", str(checkpoint), "--target", targets, "--quant", "q4", "-o", str(out), *options]
    subprocess.run([*NEARFAR, *build], check=True)
    return out


def rates(
    engine: Engine, seed: int, prefill: int, decode: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Tokens per second of a prompt that is in no cache, and of the answer after its first token."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, engine.manifest.model.vocab_size, prefill).tolist()
    times = [clock()]
    for _ in engine.generate(prompt, SamplingParams(temperature=0, max_tokens=decode, ignore_eos=True)):
        times.append(clock())
    return {"prefill": prefill / (times[1] - times[0]), "decode": (decode - 1) / (times[-1] - times[1])}
