"""The kernel jobs of all architectures' programs: what a GPU target compiles for them, each job once.

The passes that make jobs of a step's list run as in a build, without weights and without a code generator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import cache

import transformers
import tvm
from tvm import relax

from nearfar.build import manifest
from nearfar.build.program import operators
from nearfar.build.program.function import identifier
from nearfar.build.program.lowering import lower_step
from nearfar.build.program.passes import compile_flow, run_flow
from nearfar.format.kv import Float
from nearfar.kernels.contract import Kernels
from nearfar.kernels.jobs import GraphJob
from nearfar.kernels.program import Precisions
from nearfar.kernels.quantized import Matrix
from nearfar.step import operation
from nearfar.step.model import Model
from nearfar.step.reading import read_model
from nearfar.targets.gpu import variant
from nearfar.targets.gpu.classes import SOFTWARE
from tests.support.architectures import CASES
from tests.support.cases import Case
from tests.support.parity import SMALL

FUSED = "legalize"
"""The pass before which all fusions of jobs are done."""


@cache
def model_of(case: Case) -> Model:
    """The model of a case as a build reads it, without a checkpoint."""
    config = transformers.AutoConfig.for_model(case.model_type, **case.config)
    return read_model(config.to_dict(), context=case.context).model


@cache
def jobs(dtype: Float) -> tuple[GraphJob, ...]:
    """The distinct jobs of all architectures, in buckets of few rows and of many. `dtype`: that of
    activations and caches.
    """
    kernels = variant(SOFTWARE, "f16" if dtype == "float16" else "f32", vectors=False).kernels
    return tuple(dict.fromkeys(job for case in CASES for job in _jobs(model_of(case), kernels, dtype)))


def _jobs(model: Model, kernels: Kernels, dtype: Float) -> list[GraphJob]:
    """The jobs of a model's steps, in order."""
    matrices = {
        param.name: Matrix(param.n, param.k, 32, stack=param.stack)
        for param in model.step.params
        if param.is_matrix
    }
    module = tvm.IRModule({})
    for m in SMALL.step:
        dtypes = Precisions(kernels.activations, dtype)
        module[f"step_{m}"] = lower_step(model, manifest.CACHE, kernels, dtypes, matrices, m).function
    bundles = kernels.bundles(model.step, rounds_keys=False)
    bundled = {tuple(map(identifier, held)): identifier(name) for name, held in bundles.items()}
    flow = compile_flow(kernels, bundled, gpu=True)
    until = [each.name for each in flow].index(FUSED)
    module = run_flow(module, flow[:until], tvm.target.Target({"kind": "vulkan", "host": "llvm"}))
    found: list[GraphJob] = []

    def note(expr: relax.Expr) -> None:
        if (call := operators.parse(expr)) is not None:
            found.append(call.job)

    for _, function in sorted(module.functions_items(), key=lambda item: str(item[0].name_hint)):
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, note)
    return found


def part_of(found: Iterable[GraphJob], part: int, parts: int) -> list[GraphJob]:
    """One of `parts` shares of the jobs. Each share has at least one of each family."""
    families: dict[tuple[object, ...], list[GraphJob]] = {}
    for job in found:
        families.setdefault(_family(job), []).append(job)
    return [job for members in families.values() for job in members[part % len(members) :: parts]]


def _family(job: GraphJob) -> tuple[object, ...]:
    """A job without its sizes and numbers: its kind, rows, dtypes and flags."""
    values = {each.name: getattr(job, each.name) for each in dataclasses.fields(job)}
    told = (value if isinstance(value, bool | str) else value is None for value in values.values())
    return (job.kind, job.m, *told)


def reads(case: Case) -> frozenset[tuple[str, str]]:
    """The structure of a step's list: which kinds of operations read the results of which kinds."""
    listed = model_of(case).step.ops
    makers = {op.out: op.op for op in listed}
    return frozenset((makers[name], op.op) for op in listed for name in operation.reads(op) if name in makers)
