"""Kernels and the layout of weights that the GPU targets share: float32 and float16 over one set of
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from nearfar.errors import BuildError
from nearfar.format.kv import OF_BITS, Float
from nearfar.kernels.bundles import bundles
from nearfar.kernels.contract import PRODUCTS, Precision, Products, Staged, Variant, kv_suffix
from nearfar.kernels.jobs import (
    Attend,
    Conv,
    Delta,
    Embed,
    Experts,
    Greedy,
    Job,
    Linear,
    Logprobs,
    Norm,
    Project,
    RopeAppend,
    Route,
    Rows,
    Sample,
    Split,
    Ssm,
)
from nearfar.kernels.pieces import MatrixPiece, placed
from nearfar.kernels.quantized import Array, Matrix, PackedArray, QuantPieces, QuantTensor
from nearfar.targets.gpu import pieces
from nearfar.targets.gpu.classes import CLASSES, DISCRETE, SOFTWARE, DeviceClass, Tuning
from nearfar.targets.gpu.kernels.activations import gelu_erf, gelu_tanh
from nearfar.targets.gpu.kernels.append.project import project, projects
from nearfar.targets.gpu.kernels.append.rope import check_rope, rope_append
from nearfar.targets.gpu.kernels.append.rows import rows
from nearfar.targets.gpu.kernels.attention.choice import attention, split
from nearfar.targets.gpu.kernels.conv import conv
from nearfar.targets.gpu.kernels.delta import delta
from nearfar.targets.gpu.kernels.experts import experts, experts_in_pieces
from nearfar.targets.gpu.kernels.linear.choice import linear, products
from nearfar.targets.gpu.kernels.linear.embed import embed
from nearfar.targets.gpu.kernels.linear.matmul_int8 import int8_products
from nearfar.targets.gpu.kernels.linear.pieces import of_pieces
from nearfar.targets.gpu.kernels.norm import norm
from nearfar.targets.gpu.kernels.route import route
from nearfar.targets.gpu.kernels.sampling.greedy import greedy
from nearfar.targets.gpu.kernels.sampling.logprobs import logprobs
from nearfar.targets.gpu.kernels.sampling.sample import sample
from nearfar.targets.gpu.kernels.ssm import ssm


class GpuKernels:
    """The kernels of a GPU program; see nearfar.kernels.contract.Kernels. `binding`: the most bytes of an
    array of a matrix (pieces).
    """

    bundles = staticmethod(bundles)
    formulas = MappingProxyType({"relax.nn.gelu": gelu_erf, "relax.nn.gelu_tanh": gelu_tanh})
    """TVM's own need an error function, which SPIR-V lacks, and a tanh, which is NaN far from 0 on some
    drivers.
    """

    def __init__(self, tuning: Tuning, binding: int = pieces.BINDING) -> None:
        self.tuning, self.binding = tuning, binding

    @property
    def activations(self) -> Float:
        """Dtype of activations: float16 in f16 programs, except the residual stream."""
        return "float16" if self.tuning.half else "float32"

    def parts(self, matrix: Matrix) -> tuple[PackedArray, ...]:
        """The packed arrays of a matrix."""
        return pieces.parts(matrix, self.binding)

    def pack(self, matrix: Matrix, tensor: QuantTensor | QuantPieces | Array) -> tuple[Array, ...]:
        """Pack a matrix into its parts."""
        return pieces.pack(matrix, tensor, self.binding)

    def projects(self, job: Project) -> bool:
        """Whether one kernel can do the whole job, or one for each piece that is stored differently."""
        matrix = job.linear.matrix
        whole = len(pieces.pieces(matrix, self.binding)) == len(placed(matrix))
        return whole and projects(job, self.tuning)

    def check(self, job: Job) -> None:
        """BuildError if no kernel takes the job: by its type, then by its shapes."""
        if type(job) not in STAGES:
            raise BuildError(f"the GPU targets have no kernel for {job}")
        if isinstance(job, Linear | Embed):
            pieces.pieces(job.matrix, self.binding)
        if isinstance(job, Experts):
            self._stacks(job)
        if isinstance(job, RopeAppend):
            check_rope(job)

    def _stacks(self, job: Experts) -> tuple[tuple[MatrixPiece, ...], ...]:
        """The pieces of both stacks of experts."""
        return tuple(pieces.pieces(matrix, self.binding) for matrix in (job.gate_up, job.down))

    def stages(self, job: Job) -> Staged:
        """The launches of a job; BuildError if no kernel takes it."""
        self.check(job)
        if isinstance(job, Linear | Embed):
            found = pieces.pieces(job.matrix, self.binding)
            if len(found) > 1:
                return of_pieces(job, found, self.stages)
        if isinstance(job, Experts):
            return experts_in_pieces(job, *self._stacks(job))
        return _made(job, _shaping(job, self.tuning))

    def split(self, attend: Attend, linear: Linear) -> Split | None:
        """The split of attention, if it costs less than the launch that it saves; otherwise None."""
        return split(attend, linear, self.tuning)


def _alike(make: Callable[[Any], Staged]) -> Callable[[Any, Tuning | None], Staged]:
    """A maker of a kernel that all programs share."""
    return lambda job, tuning: make(job)


STAGES: dict[type[Job], Callable[[Any, Any], Staged]] = {
    Linear: linear,
    Project: project,
    Attend: attention,
    Embed: _alike(embed),
    Norm: _alike(norm),
    RopeAppend: _alike(rope_append),
    Rows: _alike(rows),
    Conv: _alike(conv),
    Delta: delta,
    Ssm: ssm,
    Route: _alike(route),
    Experts: _alike(experts),
    Greedy: _alike(greedy),
    Sample: _alike(sample),
    Logprobs: _alike(logprobs),
}
"""The makers of each job's kernel. `_shaping` decides which part of a program's tuning they get."""
SHAPED = (Linear, Project, Attend, Delta, Ssm)
"""Jobs whose kernels differ between programs."""


def _shaping(job: Job, tuning: Tuning) -> Tuning | None:
    """The part of a program's tuning that a job's kernel depends on; programs that differ only in the rest
    share the kernel.
    """
    if isinstance(job, Attend | Delta | Ssm) or (isinstance(job, Linear) and tuning.device is SOFTWARE):
        tuning = replace(tuning, half=False)  # The kernel uses the dtypes of its job.
    if isinstance(job, Linear):
        return replace(tuning, products=products(job, tuning))
    return replace(tuning, products="float") if isinstance(job, SHAPED) else None


@lru_cache(maxsize=1024)
def _made(job: Job, tuning: Tuning | None) -> Staged:
    """The launches of a job, cached, because parsing its script is most of the work."""
    return STAGES[type(job)](job, tuning)


def variants(
    *, vectors: bool = False, cooperative: bool = False, binding: int = pieces.BINDING
) -> tuple[Variant, ...]:
    """The programs of a GPU target; within each class, the preferred program comes first.

    `cooperative`: whether the target has cooperative matrices.
    """
    precisions: tuple[Precision, ...] = ("f16", "f32")

    def there(device: DeviceClass, precision: Precision, kind: Products) -> bool:
        if kind == "cooperative":
            return cooperative and device is DISCRETE and precision == "f16"
        return kind == "float" or device is not SOFTWARE

    return tuple(
        variant(each, precision, vectors, kind, binding)
        for each in CLASSES.values()
        for precision in precisions
        for kind in PRODUCTS
        if there(each, precision, kind)
    )


def with_caches(variants: Sequence[Variant], kv_bits: Sequence[int]) -> tuple[Variant, ...]:
    """The variants, once for each requested cache (see BuildOptions.kv_bits)."""
    return tuple(
        each if bits == 16 else replace(each, name=each.name + kv_suffix(bits), kv=OF_BITS[bits])
        for bits in kv_bits
        for each in variants
    )


def variant(
    device: DeviceClass,
    precision: Precision,
    vectors: bool,
    products: Products = "float",
    binding: int = pieces.BINDING,
) -> Variant:
    """A program for a class of devices."""
    kernels = GpuKernels(Tuning(device, precision == "f16", vectors, products), binding)
    name = f"{device.name}-{precision}" + ("" if products == "float" else f"-{products}")
    return Variant(name, precision, kernels, device.name, products)


__all__ = ["GpuKernels", "int8_products", "variant", "variants", "with_caches"]
