"""Fuses the projections to q, k and v with the operators that read them, where the target has a kernel for
both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from nearfar.build.program import operators
from nearfar.build.program.operators import OpCall
from nearfar.kernels.contract import Kernels
from nearfar.kernels.jobs import Linear, Project, RopeAppend, Rows

Bundled = Mapping[tuple[str, ...], str]
"""The name of the parameter that holds several vectors in one tensor, by the names of the vectors' parameters
in their order in it.
"""


@dataclass(frozen=True)
class _Found:
    """A projection and the operator that reads it."""

    job: Project
    linear: OpCall
    paged: OpCall


@relax.expr_functor.mutator
class _Projection(relax.PyExprMutator):
    """Rewrites the projections of one function. `added`: the new parameters of the function, by name."""

    def __init__(self, module: tvm.IRModule, kernels: Kernels, bundled: Bundled) -> None:
        super().__init__(module)
        self._kernels, self._bundled = kernels, bundled
        self._users: dict[relax.Var, int] = {}
        self._rows: dict[tuple[Rows, tuple[relax.Expr, ...]], relax.Var] = {}
        self.added: dict[str, relax.Var] = {}

    def run(self, function: relax.Function) -> relax.Function:
        """Give the function with its projections fused."""
        for block in function.body.blocks:
            if isinstance(block, relax.DataflowBlock):
                self._users.update((var, len(users)) for var, users in relax.analysis.udchain(block).items())
        made = self.visit_expr(function)
        params = [*made.params, *self.added.values()]
        return relax.Function(params, made.body, made.ret_ty, made.is_pure, made.attrs)

    def visit_call_(self, call: relax.Call) -> Any:
        read = operators.parse(call)
        alone = read is not None and "x" in read.named and self._users.get(read.named["x"]) == 1
        call = super().visit_call_(call)
        found = self._found(call) if alone else None
        fused = self._fused(found) if found is not None else None
        return call if fused is None else self.builder_.normalize(fused)

    def _found(self, call: relax.Call) -> _Found | None:
        """The projection that `call` reads, with `call`; None where the target has no kernel for both."""
        paged = operators.parse(call)
        if paged is None or not isinstance(paged.job, RopeAppend):
            return None
        linear = operators.parse(self.lookup_binding(paged.named["x"]))
        if linear is None or not isinstance(linear.job, Linear):
            return None
        if linear.job.residual or linear.job.gate or linear.job.rows or linear.job.softcap:
            return None
        job = Project(linear.job, paged.job)
        return _Found(job, linear, paged) if self._kernels.projects(job) else None

    def _fused(self, found: _Found) -> relax.Call | None:
        """Make the fused call; None where no tensor holds the vectors of both."""
        have = {**found.paged.named, **found.linear.named}
        names = list(found.job.vectors)
        if names:
            vectors = self._vectors([have[name] for name in names], sum(found.job.vectors.values()))
            if vectors is None:
                return None
            have["vectors"] = vectors
        rows = Rows.of(found.job.paged)
        have["rows"] = self._rows_of(rows, tuple(have[name] for name in rows.inputs()))
        return operators.rebuilt(found.job, have)

    def _vectors(self, held: list[relax.Var], length: int) -> relax.Var | None:
        if len(held) == 1:
            return held[0]
        name = self._bundled.get(tuple(str(var.name) for var in held))
        if name is None:
            return None
        return self.added.setdefault(name, relax.Var(name, relax.TensorType([length], "float32")))

    def _rows_of(self, job: Rows, tensors: tuple[relax.Expr, ...]) -> relax.Var:
        """The result of one `Rows` launch, shared by all projections over the same rows."""
        if (job, tensors) not in self._rows:
            self._rows[job, tensors] = self.builder_.emit(operators.call(job, tensors))
        return self._rows[job, tensors]


def FuseProjection(kernels: Kernels, bundled: Bundled) -> Any:
    """Make the pass; `bundled`: the tensors that hold several vectors."""

    @tvm.transform.module_pass(opt_level=0, name="FuseProjection")
    class Fusion:
        def transform_module(self, module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
            for global_var, func in module.functions_items():
                if isinstance(func, relax.Function):
                    module[global_var] = _Projection(module, kernels, bundled).run(func)
            return module

    return Fusion()
