"""Jobs as the CPU target compiles them, run on NumPy arrays and compared with job_reference.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm

from nearfar.build.program.kept import KernelCache, ObjectCache
from nearfar.edge_runtime.executors.cpu.library import DlTensor, Library, aligned
from nearfar.edge_runtime.executors.quantized_pages import pages_of, parts_of
from nearfar.format.kv import BITS
from nearfar.kernels.jobs import GraphJob, Job
from nearfar.kernels.jobs.logits import OverLogits
from nearfar.targets.cpu import CpuKernels
from nearfar.targets.cpu.codegen import compile_library, native
from nearfar.targets.cpu.kernels.extents import closed
from nearfar.targets.cpu.units import Unit
from tests.support import quantized_kv
from tests.support.job_reference import (
    PLAIN,
    matrices_of,
    random_inputs,
    random_matrix,
    reference,
    rounding_weights,
)

Array = npt.NDArray[Any]
HERE = native()
KERNELS = CpuKernels(HERE)
OBJECTS = ObjectCache.beside(KernelCache())
"""Object files of earlier runs. For a file of tests, LLVM takes 20 CPU seconds, and making TIR 0.5."""


class CpuJobs:
    """The kernels of several jobs in one library, which compiles faster than one library for each job."""

    def __init__(self, folder: Path, jobs: Sequence[Job], threads: int = 2, unit: Unit = HERE) -> None:
        self.staged = {job: CpuKernels(unit).stages(job) for job in jobs}
        # A kernel has one name whatever other jobs are in the library: its object file contains the name.
        labels = Counter[str]()
        self._names: dict[Job, list[str]] = {}
        functions = {}
        for job, staged in self.staged.items():
            again = f"_{labels[job.label]}" if labels[job.label] else ""
            named = dict(staged.named(f"{job.label}{again}"))
            labels[job.label] += 1
            self._names[job] = list(named)
            functions |= {name: stage.func.with_attr("global_symbol", name) for name, stage in named.items()}
        file = folder / "model.so"
        compile_library(tvm.IRModule(functions), file, unit, keep=OBJECTS)
        self.library = Library(file)
        self.pool = self.library.pool(threads)

    def run(
        self,
        job: Job,
        arrays: dict[str, Array],
        place: Callable[[Sequence[int], npt.DTypeLike], Array] = aligned,
        before: Callable[[], None] = lambda: None,
    ) -> dict[str, Array]:
        """Run a job; gives all arrays afterwards. Scratch begins as NaN, because a kernel must not rely on
        its content. `place`: allocates an array; `before`: is called when all arrays are filled.
        """
        held: dict[str, Array] = {}
        for name, array in arrays.items():
            held[name] = place(array.shape, array.dtype)
            held[name][...] = array
        staged = self.staged[job]
        for i, (shape, dtype) in enumerate(staged.scratch):
            held[f"scratch:{i}"] = aligned(shape, dtype)
            held[f"scratch:{i}"].view(np.uint8)[...] = 0xFF
        launches = [
            (
                name,
                [
                    DlTensor(_taken(held[arg], param.shape, job))
                    for arg, param in zip(stage.args, stage.func.params, strict=True)
                ],
            )
            for name, stage in zip(self._names[job], staged.stages, strict=True)
        ]
        bound = self.library.bind(launches)
        before()
        self.pool.replay(bound)
        return held

    def compute(self, job: GraphJob, inputs: dict[str, Array]) -> dict[str, Array]:
        """Like `reference`, but by the kernel; `out` is filled with sevens before."""
        arrays = {name: inputs[name] for name in inputs if name not in PLAIN} | {
            "out": np.full(job.out[0], 7, job.out[1])
        }
        caches = {name: array for name, array in arrays.items() if name in ("k_cache", "v_cache")}
        got = self.run(job, arrays | {name: _held(name, array, job) for name, array in caches.items()})
        got |= {name: _told(name, got[name], job) for name in caches}
        return {name: got[name] for name in ("out", "k_cache", "v_cache") if name in got}

    def check(self, job: GraphJob, inputs: dict[str, Array], tolerance: float) -> None:
        """Check that the kernel equals the reference, within `tolerance` of the largest value (at least of
        1).

        For rope_append, q is compared only where a row is not padding. Rows of `out` beyond the job's must
        stay unchanged.
        """
        want, got = reference(job, inputs), self.compute(job, inputs)
        rows = np.arange(job.m)
        if job.kind == "rope_append":
            rows = np.flatnonzero(inputs["positions"][: job.m] >= 0)
        scale = max(1.0, float(np.abs(want["out"][rows]).max(initial=0)))
        np.testing.assert_allclose(
            got["out"][rows], want["out"][rows], rtol=0, atol=tolerance * scale, err_msg=job.label
        )
        assert (got["out"][job.m :] == 7).all()
        for name in ("k_cache", "v_cache"):
            if name in want:
                if job.kv_dtype in BITS:
                    weights = rounding_weights(job, inputs) if name == "k_cache" else None
                    quantized_kv.check(got[name], want[name], inputs[name], job.kv_dtype, weights)
                    continue
                ulp = 2e-3 if job.kv_dtype == "float16" else tolerance
                np.testing.assert_allclose(
                    got[name], want[name], rtol=ulp, atol=ulp, err_msg=f"{job.label} {name}"
                )


def _taken(array: Array, shape: Sequence[Any], job: Job) -> Array:
    """The array as the kernel gets it: with as many rows as the manifest would say."""
    told = closed(shape, job.rows if isinstance(job, OverLogits) else job.m)
    return array if told[0] is None else array[: told[0]]


def _held(name: str, cache: Array, job: Any) -> Array:
    """Convert keys or values to their layout in pages on cpu (docs/artifact.md, kv.L.k): keys have positions
    innermost.
    """
    if job.kv_dtype in BITS:
        return pages_of(quantized_kv.parts(cache, job.kv_dtype), job.kv_dtype, innermost=name == "k_cache")
    if name == "v_cache":
        return cache
    return np.ascontiguousarray(cache.swapaxes(2, 3)).reshape(cache.shape)


def _told(name: str, pages: Array, job: Any) -> Array:
    """Convert keys or values from their layout in pages on cpu."""
    if job.kv_dtype in BITS:
        parts = parts_of(pages, job.head_dim, job.kv_dtype, innermost=name == "k_cache")
        return quantized_kv.rows(parts, job.kv_dtype)
    if name == "v_cache":
        return pages
    count, heads, size, dim = pages.shape
    return pages.reshape(count, heads, dim, size).swapaxes(2, 3)


def inputs_of(job: GraphJob, rng: np.random.Generator, **sizes: int) -> dict[str, Array]:
    """Random inputs of a job with its matrix: packed as w0, w1, … and as numbers in w."""
    matrices = matrices_of(job)
    inputs, packed = random_inputs(job, rng, **sizes), []
    for name, matrix in matrices.items():
        tensor, inputs[name] = random_matrix(rng, matrix)
        arrays = KERNELS.pack(matrix, tensor)
        for array, part in zip(arrays, KERNELS.parts(matrix), strict=True):
            assert (array.shape, array.dtype) == (part.shape, np.dtype(part.dtype))
        packed += arrays
    return inputs | {f"w{i}": array for i, array in enumerate(packed)}
