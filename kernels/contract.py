"""The interface of a target with kernels of its own: how it packs matrices, its programs, and the launches of
each job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from nearfar.format.adapters import DeviceClass
from nearfar.format.kv import Float, KvDtype
from nearfar.kernels.bundles import Bundles
from nearfar.kernels.jobs import Attend, Job, Linear, Project, Split
from nearfar.kernels.quantized import Array, Matrix, PackedArray, QuantPieces, QuantTensor
from nearfar.step.model import Step

if TYPE_CHECKING:
    from tvm import tirx

Precision = Literal["f32", "f16"]
Products = Literal["float", "int8", "cooperative"]
"""How a program multiplies a prompt's rows: as floats, rounded to 8 bits (docs/decisions/0017), or as
cooperative matrices of float16 (docs/decisions/0018).
"""
PRODUCTS: tuple[Products, ...] = ("float", "int8", "cooperative")
SCRATCH = "scratch:"


def kv_suffix(bits: int) -> str:
    """The suffix of the name of a program whose cache has values of `bits` bits; empty for floats."""
    return "" if bits == 16 else f"-kv{bits}"


@dataclass(frozen=True)
class Stage:
    """One launch. `args` name the job's inputs and `out` (for a sampler's job: buffers), or `scratch:<i>`
    between stages.
    """

    func: tirx.PrimFunc
    args: tuple[str, ...]


@dataclass(frozen=True)
class Staged:
    """Launches in order, and the (shape, dtype) of each scratch buffer between them."""

    stages: tuple[Stage, ...]
    scratch: tuple[tuple[tuple[int, ...], str], ...] = ()

    def named(self, name: str) -> Iterator[tuple[str, Stage]]:
        """The launches of the job `name`, each with the name of its own kernel."""
        for index, stage in enumerate(self.stages):
            yield name if len(self.stages) == 1 else f"{name}_s{index}", stage


class Packing(Protocol):
    """How a target lays out matrices; all of its programs share it."""

    def parts(self, matrix: Matrix) -> tuple[PackedArray, ...]:
        """The packed arrays of a matrix."""
        ...

    def pack(self, matrix: Matrix, tensor: QuantTensor | QuantPieces | Array) -> tuple[Array, ...]:
        """Pack a matrix into the arrays of `parts`; `tensor` is a QuantTensor if it is quantized, QuantPieces
        if it has pieces, else a float array [n, k].
        """
        ...

    def bundles(self, step: Step, *, rounds_keys: bool) -> Bundles:
        """The tensors that hold several vectors of the step, for kernels that read them joined.

        `rounds_keys`: include those for programs that round keys (nearfar.format.kv.rounding).
        """
        ...


SHARED_FROM = 16
"""Rows from which threads of a processor share work that costs little a row: waking a thread takes time too.
"""
Formula = Callable[[Any], Any]
"""A function of one value as an expression of TIR: takes and returns float32."""


class Kernels(Packing, Protocol):
    """The kernels of one program, with static shapes. The outputs of a stage are its last arguments."""

    @property
    def activations(self) -> Float:
        """Dtype of the values between kernels, except the residual stream, which is float32."""
        ...

    @property
    def formulas(self) -> Mapping[str, Formula]:
        """Formulas of activations that stand by themselves, by the name of Relax's operator; TVM's hold for
        all others.
        """
        ...

    def projects(self, job: Project) -> bool:
        """Whether the target has a kernel for both of the job's parts in one launch."""
        ...

    def check(self, job: Job) -> None:
        """BuildError if the target has no kernel for a job.

        A build checks all jobs before it reads weights, so this looks at the job only and makes nothing.
        """
        ...

    def stages(self, job: Job) -> Staged:
        """The launches of a job that passes `check`."""
        ...

    def split(self, attend: Attend, linear: Linear) -> Split | None:
        """How attention is split into parts that the matmul behind it joins; None: attention is computed
        whole.
        """
        ...


@dataclass(frozen=True)
class Variant:
    """One program of a target: all programs compute the same step over the same weights.

    `name`: the program's name, unique in the artifact. `device_class`: the kind of device that its kernels
    are shaped for (nearfar.targets.gpu.classes); None if there is only one kind. `products`: see Products.
    `kv`: dtype of keys and values in the cache; None: that of `precision`.
    """

    name: str
    precision: Precision
    kernels: Kernels
    device_class: DeviceClass | None = None
    products: Products = "float"
    kv: KvDtype | None = None
