"""The options of a build. Nothing heavy is imported here, so that bad options are rejected before a compiler
loads.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nearfar.format.adapters import DEVICE_CLASSES
from nearfar.format.kv import OF_BITS, OF_TARGET, ROUNDED
from nearfar.kernels.buckets import Buckets

QUANTIZED = (
    "MLX",
    "AWQ",
    "GPTQ",
    "compressed-tensors",
    "fp8",
    "bitsandbytes",
    "mxfp4",
    "GGUF",
    "MLC",
)
"""Formats of quantized checkpoints, in the order in which they are tried."""
QUANT, GROUP_SIZE = "q4", 64  # the scheme if the command line names none and the checkpoint is not quantized
MULTIPLIED_AS = ("float", "cooperative")
"""The default products of prompts: those of them that a target and its device classes have."""


Quality = Literal["fast", "good", "best"]
QUALITIES: tuple[Quality, ...] = ("fast", "good", "best")
QUALITY: Quality = "fast"


@dataclass(frozen=True)
class BuildOptions:
    """The options of a build. `checkpoint`: a local directory or file of a format of docs/checkpoints.md, or
    a hub id. `out`: a folder that gets one sub-directory a target.

    `quant`, `group_size`: None means QUANT and GROUP_SIZE, or those of a quantized checkpoint. `requantize`:
    what a quantized checkpoint is quantized to again, instead of keeping its codes. `export_function` (mlx):
    also write the step as a function that needs no model code. `context`: the most positions. `buckets`: the
    numbers of rows that a step can have, None for the target's defaults; fewer make the artifact smaller and
    slower. `cpu`: the platforms to make programs for: names of targets/cpu/platforms.py, or "host".
    `cpu_features` (cpu): the vector units: names of targets/cpu/units.py, "baseline" or "native" (this
    machine's); empty: one program for each kind of processor of an architecture. `device_classes` (webgpu,
    vulkan): kinds of GPUs to make programs for; `products`: what those programs multiply, None for
    MULTIPLIED_AS. `kv_bits`: the KV caches to make programs for, 16 for floats, 8 and 4 for quantized codes
    of that many bits. `embeddings`: build an embedding model, even if the checkpoint does not say that it is
    one. `quality`: how long to look for good codes (build/calibration/quality.py); `calibrate`: the text file
    that good and best are calibrated with, None for the one that comes with nearfar. `scales`: the ways of
    storing scales that may be chosen (build/weights/ways.py), None for float16 pairs with fast, and all that
    the targets have with good and best. `bits`: mean bits of a
    weight, scales and biases included; `fit`: bytes of all weights; with either, each matrix has bits of its
    own. `kernel_cache`: take compiled programs of earlier builds, and keep those of this one
    (build/program/kept.py). `kernel_figures` (webgpu, vulkan): write the figures of each kernel into the
    artifact, for kernel developers. `adapter`: a LoRA adapter, a folder or a hub id, that is merged into the
    checkpoint; a checkpoint that is an adapter itself is merged into the model that it names.
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
    scales: tuple[str, ...] | None = None
    bits: float | None = None
    fit: int | None = None
    kernel_cache: bool = True
    kernel_figures: bool = False
    adapter: str | None = None

    @property
    def multiplied_as(self) -> tuple[str, ...]:
        """The products to make programs for: `products`, or the default."""
        return MULTIPLIED_AS if self.products is None else self.products

    @property
    def rounds_keys(self) -> bool:
        """Whether any target gets programs that round keys by a calibration."""
        return any(map(self.rounds_keys_of, self.targets))

    def rounds_keys_of(self, target: str) -> bool:
        """Whether `target` gets programs that round keys by a calibration."""
        able = set(self.kv_bits) & set(OF_TARGET.get(target, ()))
        return any(OF_BITS[bits] in ROUNDED for bits in able)
