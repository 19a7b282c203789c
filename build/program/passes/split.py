"""Lets the matmul after attention combine the parts of split attention: one launch less a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import tvm
from tvm import relax

from nearfar.build.program import operators
from nearfar.build.program.passes.fuse import Fusion
from nearfar.kernels.contract import Kernels
from nearfar.kernels.jobs import Attend, Linear


@relax.expr_functor.mutator
class _Combine(Fusion):
    """Rewrites matmuls that read attention. `readers`: the variables that read each variable."""

    def __init__(
        self, module: tvm.IRModule, kernels: Kernels, readers: Mapping[relax.Var, Sequence[relax.Var]]
    ) -> None:
        super().__init__(module)
        self._kernels, self._readers = kernels, readers

    def rewrite(self, call: relax.Call) -> Any:
        found = self.ours(call)
        if found is None or not isinstance(found.job, Linear) or found.job.split is not None:
            return None
        named = dict(found.named)
        x = named.pop("x")
        attend = self.ours(x)
        if attend is None or not isinstance(attend.job, Attend) or len(self._readers[x]) > 1:
            return None
        split = self._kernels.split(attend.job, found.job)
        if split is None:
            return None
        parts = replace(attend.job, split=split, sinks=False)
        tensors = dict(attend.named)
        sinks = {"sinks": tensors.pop("sinks")} if split.sinks else {}
        partial = self.builder_.emit(operators.rebuilt(parts, tensors), "partial")
        fused = replace(found.job, split=split, split_heads=attend.job.heads)
        return operators.rebuilt(
            fused, {**named, **sinks, "partial": partial, "positions": tensors["positions"]}
        )


def CombineInMatmul(kernels: Kernels) -> Any:
    """Make the pass, which applies where the target supports it. It counts the readers of attention, so dead
    code must have been removed.
    """

    @tvm.transform.module_pass(opt_level=0, name="CombineInMatmul")
    class Combine:
        def transform_module(self, module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
            for global_var, func in module.functions_items():
                if isinstance(func, relax.Function):
                    readers = {
                        var: users
                        for block in func.body.blocks
                        for var, users in relax.analysis.udchain(block).items()
                    }
                    module[global_var] = _Combine(module, kernels, readers).visit_expr(func)
            return module

    return tvm.transform.Sequential([Combine(), relax.transform.DeadCodeElimination()])
