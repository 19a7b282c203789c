"""Lowers a step's list to Relax: one function for each bucket of M rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvm import relax

from nearfar.build.program.function import StepFunction
from nearfar.build.program.operations import OPERATIONS
from nearfar.format.manifest import Cache
from nearfar.kernels.contract import Kernels
from nearfar.kernels.program import Precisions
from nearfar.kernels.quantized import Matrix
from nearfar.step.model import Model


@dataclass(frozen=True)
class Lowered:
    """A Relax function `step_<m>`, and the plan argument that each of its parameters stands for."""

    function: relax.Function
    arguments: Mapping[str, str]


def lower_step(
    model: Model, cache: Cache, kernels: Kernels, dtypes: Precisions, matrices: Mapping[str, Matrix], m: int
) -> Lowered:
    """The step for M rows. Inputs carry the names of buffers, weights are named `<param>.<part>`."""
    function = StepFunction(model, cache, kernels, dtypes, matrices, m)
    for op in model.step.ops:
        function.add(op, OPERATIONS[type(op)](function, op))
    return Lowered(function.finish(), function.arguments())
