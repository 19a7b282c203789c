"""What a target with kernels of its own offers the build: how it packs matrices, the programs that it makes
over them, and the launches of each job.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from nearfar.format.adapters import DeviceClass
from nearfar.format.kv import Float, KvDtype
from nearfar.kernels.bundles import Bundles
from nearfar.kernels.jobs import Attend, Job, Linear, Project, Split
from nearfar.kernels.quantized import Array, Matrix, Part, QuantTensor
from nearfar.step.model import Step

if TYPE_CHECKING:
    from tvm import tirx

Precision = Literal["f32", "f16"]
Products = Literal["float", "int8", "cooperative"]
"""What a prompt's rows are multiplied as: as they are, rounded to 8 bits (docs/decisions/0017), or as
cooperative matrices of float16 (docs/decisions/0018).
"""
PRODUCTS: tuple[Products, ...] = ("float", "int8", "cooperative")
SCRATCH = "scratch:"


def kv_suffix(bits: int) -> str:
    """What the name of a program with a cache of so many bits ends in; nothing where it holds floats."""
    return "" if bits == 16 else f"-kv{bits}"


@dataclass(frozen=True)
class Stage:
    """One launch: `args` name the job's inputs and `out` (of a sampler job: buffers), or `scratch:<i>`
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
        """The launches of a job that is called `name`, each with the name of its own kernel."""
        for index, stage in enumerate(self.stages):
            yield name if len(self.stages) == 1 else f"{name}_s{index}", stage


class Packing(Protocol):
    """How a target lays out matrices: the same for all of its programs."""

    def parts(self, matrix: Matrix) -> tuple[Part, ...]:
        """The packed arrays of a matrix."""
        ...

    def pack(self, matrix: Matrix, tensor: QuantTensor | Array) -> tuple[Array, ...]:
        """Pack a matrix into its parts: QuantTensor where quantized, else a float array [n, k]."""
        ...

    def bundles(self, step: Step, *, rounds: bool) -> Bundles:
        """The tensors that hold several vectors of the step, for kernels that read them so. `rounds`: also
        those for programs that round keys (nearfar.format.kv.rounding).
        """
        ...


class Kernels(Packing, Protocol):
    """The kernels of one program, with static shapes. Outputs are the last arguments of a stage."""

    @property
    def activations(self) -> Float:
        """Dtype of what passes between kernels, but for the residual stream (which is float32 always)."""
        ...

    def projects(self, job: Project) -> bool:
        """Whether there is a kernel for both jobs in one."""
        ...

    def check(self, job: Job) -> None:
        """BuildError where the target has no kernel for a job. A build asks it for all jobs before it reads
        weights, so it looks at the job and makes nothing.
        """
        ...

    def stages(self, job: Job) -> Staged:
        """The launches of a job that passes `check`."""
        ...

    def split(self, attend: Attend, linear: Linear) -> Split | None:
        """The parts in which attention is left to the matmul that alone reads it; None: it is made whole."""
        ...


@dataclass(frozen=True)
class Variant:
    """One program of a target: all of them compute the same step over the same weights.

    `name`: of the program, one of its own in the artifact. `device_class`: the kind of device that its
    kernels are shaped for (nearfar.targets.gpu.classes), None where there is one kind. `products`: see
    Products. `kv`: dtype of keys and values in the cache, None: that of `precision`.
    """

    name: str
    precision: Precision
    kernels: Kernels
    device_class: DeviceClass | None = None
    products: Products = "float"
    kv: KvDtype | None = None
