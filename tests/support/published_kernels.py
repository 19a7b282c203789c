"""The kernels and plans of a published shape as a build makes them, without its weights."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import tvm

from nearfar.build import manifest
from nearfar.build.program.compile import Compilation, LoweredProgram, compile_program
from nearfar.build.synth import published
from nearfar.format.consistency import DTYPE_BYTES
from nearfar.format.figures import Figures
from nearfar.kernels.buckets import Buckets
from nearfar.kernels.contract import Packing, Precision, Staged
from nearfar.kernels.emission import module_of
from nearfar.kernels.jobs import Embed, Job, Linear, Project
from nearfar.kernels.quantized import Matrix
from nearfar.step.model import Model
from nearfar.step.reading import read_model
from nearfar.targets.gpu import GpuKernels, variant
from nearfar.targets.gpu.classes import DeviceClass, Tuning
from nearfar.targets.gpu.figures import figures_of
from nearfar.targets.vulkan.codegen import Module, modules

LAYERS = 2
"""Layers of the compiled model: one more layer repeats the same kernels."""
FEW, MANY = 1, 256
"""Rows of the steps whose kernels are measured: a token, and the largest bucket."""
_LAYER = re.compile(r"weight:layers\.(\d+)\.")


@dataclass(frozen=True)
class Measured:
    """The first launch of a job, with its figures."""

    job: Job
    figures: Figures
    matrix: int
    """Bytes of the job's matrix; 0: it has none."""


class _Noted(GpuKernels):
    """Kernels that record the jobs that they are asked for."""

    def __init__(self, tuning: Tuning) -> None:
        super().__init__(tuning)
        self.jobs: dict[Job, Staged] = {}

    def stages(self, job: Job) -> Staged:
        """See GpuKernels.stages."""
        if job not in self.jobs:
            self.jobs[job] = super().stages(job)
        return self.jobs[job]


@dataclass(frozen=True)
class Compiled:
    """A shape for a class of devices, q4 in groups of 64: its kernels, and sums over a decode step."""

    measured: tuple[Measured, ...]
    launches_a_layer: float
    """Launches from the first one with weights of a layer to its last one."""
    written_share: float
    """Bytes that a token's step writes, as a share of the weights' bytes."""


@cache
def compiled(shape: str, device: DeviceClass, precision: Precision = "f16") -> Compiled:
    """Compile a shape's steps of a token and of the largest bucket."""
    program, jobs = _program(shape, device, precision, Buckets((FEW, MANY), (FEW,)))
    packing = variant(device, precision, vectors=False).kernels
    measured = [
        Measured(job, figures_of(staged.stages[0].func), _matrix_bytes(job, packing))
        for job, staged in jobs.items()
    ]
    decode = next(plan for plan in program.plans if (plan.function, plan.size) == ("step", FEW))
    layered = [i for i, launch in enumerate(decode.launches) if any(map(_LAYER.match, launch.args))]
    inside = range(layered[0], layered[-1] + 1)
    written = [figures_of(program.kernels[launch.kernel]).bytes_written for launch in decode.launches]
    more = published(shape).config["num_hidden_layers"] / LAYERS - 1
    matrices = _matrices(_model(shape))
    weights = sum(_bytes(matrix, packing) for matrix in matrices.values())
    layers = sum(_bytes(matrix, packing) for name, matrix in matrices.items() if name.startswith("layers."))
    return Compiled(
        measured=tuple(measured),
        launches_a_layer=len(inside) / LAYERS,
        written_share=(sum(written) + more * sum(written[i] for i in inside)) / (weights + more * layers),
    )


def pipelines(shape: str, device: DeviceClass, precision: Precision = "f16") -> int:
    """The number of kernels of the whole program, over all buckets."""
    return len(_program(shape, device, precision, Buckets())[0].kernels)


def layer_modules(shape: str, device: DeviceClass, precision: Precision = "f16") -> dict[str, Module]:
    """The vulkan target's modules of a layer: first of a token's step, then of the largest bucket's."""
    program, _ = _program(shape, device, precision, Buckets((FEW, MANY), (FEW,)), "vulkan")
    plans = [plan for plan in program.plans if plan.function == "step"]
    names = []
    for plan in sorted(plans, key=lambda plan: plan.size):
        layered = [i for i, launch in enumerate(plan.launches) if any(map(_LAYER.match, launch.args))]
        names += [launch.kernel for launch in plan.launches[layered[0] : layered[-1] + 1]]
    made = modules(module_of(program))
    return {name: made[name] for name in dict.fromkeys(names)}


def _program(
    shape: str,
    device: DeviceClass,
    precision: Precision,
    buckets: Buckets,
    target: Literal["webgpu", "vulkan"] = "webgpu",
) -> tuple[LoweredProgram, dict[Job, Staged]]:
    """Compile a target's variant."""
    vectors = target == "vulkan"
    model, made = _model(shape), variant(device, precision, vectors=vectors)
    kernels = _Noted(Tuning(device, precision == "f16", vectors))
    job = Compilation(model, _matrices(model), manifest.CACHE, buckets)
    program = compile_program(job, replace(made, kernels=kernels), tvm.target.Target(target))
    return program, kernels.jobs


def _model(shape: str) -> Model:
    return read_model({**published(shape).config, "num_hidden_layers": LAYERS}).model


def _matrices(model: Model) -> dict[str, Matrix]:
    return {
        param.name: Matrix(
            param.n, param.k, 16 if param.floats else 4, 0 if param.floats else 64, param.stack
        )
        for param in model.step.params
        if param.is_matrix
    }


def _matrix_bytes(job: Job, packing: Packing) -> int:
    product = job.linear if isinstance(job, Project) else job
    return _bytes(product.matrix, packing) if isinstance(product, Linear | Embed) else 0


def _bytes(matrix: Matrix, packing: Packing) -> int:
    return sum(math.prod(part.shape) * DTYPE_BYTES[part.dtype] for part in packing.parts(matrix))
