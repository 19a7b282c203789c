"""What a build can be told. Nothing heavy is imported here: it is refused before a compiler loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nearfar.format.adapters import DEVICE_CLASSES
from nearfar.format.kv import OF_BITS, OF_TARGET, ROUNDED
from nearfar.kernels.buckets import Buckets

PACKED = ("MLX", "AWQ", "GPTQ", "compressed-tensors", "fp8", "bitsandbytes", "GGUF", "MLC")
"""Formats of quantized checkpoints, in the order in which they are looked for."""
QUANT, GROUP_SIZE = "q4", 64  # where the command line says nothing and the checkpoint is not quantized
MULTIPLIED_AS = ("float", "cooperative")
"""What prompts are multiplied as where nothing is said: those of them that a target and its classes have."""


Quality = Literal["fast", "good", "best"]
QUALITIES: tuple[Quality, ...] = ("fast", "good", "best")
QUALITY: Quality = "fast"


@dataclass(frozen=True)
class BuildOptions:
    """What to build. `checkpoint`: a local directory or file of a format of docs/checkpoints.md, or a hub
    id. `out`: one sub-directory a target.

    `quant`, `group_size` None: QUANT and GROUP_SIZE, or what a quantized checkpoint has. `requantize`: what
    a quantized checkpoint is quantized to anew, instead of keeping its codes. `export_function`
    (mlx): also write the step as a function that needs no model code. `context`: no more positions than
    these. `buckets`: rows that a step can have, None: as many as suit the target; fewer make a smaller
    artifact, and a slower one.
    `cpu`: the platforms to make programs for: names of targets/cpu/platforms.py, or "host". `cpu_features`
    (cpu): the vector units: names of targets/cpu/units.py, "baseline" or "native" (this machine's); none:
    those that an architecture's processors differ in.
    `device_classes` (webgpu, vulkan): kinds of GPUs to make programs for; `products`: what those multiply,
    None: MULTIPLIED_AS.
    `kv_bits`: the KV caches to make programs for, 16 for floats, 8 and 4 for codes of so many bits.
    `embeddings`: the model gives embeddings, though the checkpoint does not say so.
    `quality`: how long is looked for good codes (build/calibration/quality.py); `calibrate`: the text file
    that good and best are calibrated with, None: the one that comes with nearfar. `bits`: of a weight on
    average, scales and biases included; `fit`: bytes of all weights; each matrix then has bits of its own.
    `kernel_cache`: take compiled programs of earlier builds, and keep those of this one
    (build/program/kept.py). `kernel_figures` (webgpu, vulkan): what each kernel does goes into the artifact,
    for people who work on kernels.
    """

    checkpoint: str
    out: Path
    targets: tuple[str, ...] = ("cpu", "webgpu")
    quant: str | None = None
    group_size: int | None = None
    requantize: str | None = None
    cpu: tuple[str, ...] = ("host",)
    cpu_features: tuple[str, ...] = ()
    dump_ir: Path | None = None
    export_function: bool = False
    context: int | None = None
    buckets: Buckets | None = None
    device_classes: tuple[str, ...] = DEVICE_CLASSES
    products: tuple[str, ...] | None = None
    kv_bits: tuple[int, ...] = (16,)
    embeddings: bool = False
    quality: Quality = QUALITY
    calibrate: Path | None = None
    bits: float | None = None
    fit: int | None = None
    kernel_cache: bool = True
    kernel_figures: bool = False

    @property
    def multiplied_as(self) -> tuple[str, ...]:
        """The products of what was asked for, or of what is made else."""
        return MULTIPLIED_AS if self.products is None else self.products

    @property
    def rounds_keys(self) -> bool:
        """Whether there are to be programs that round keys by a calibration."""
        return any(map(self.rounds_keys_of, self.targets))

    def rounds_keys_of(self, target: str) -> bool:
        """Whether there are to be such programs of a target."""
        able = set(self.kv_bits) & set(OF_TARGET.get(target, ()))
        return any(OF_BITS[bits] in ROUNDED for bits in able)
