"""Fuses our operators with their neighbours. Each fusion edits the job record and the tensors together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tvm
from tvm import relax

from nearfar.build.program import operators
from nearfar.build.program.operators import OpCall
from nearfar.kernels.jobs import GraphJob, Linear, Norm
from nearfar.step.operation import Activation

ACTIVATIONS: dict[str, Activation] = {
    "relax.nn.silu": "silu", "relax.nn.gelu_tanh": "gelu_tanh", "relax.nn.gelu": "gelu_erf",
    "relax.sigmoid": "sigmoid",
}  # fmt: skip


class Fusion(relax.PyExprMutator):
    """Walks one function and gives each binding's value to `rewrite`, which can look up earlier bindings."""

    def value(self, expr: Any) -> Any:
        """The expression that a variable is bound to so far; other expressions unchanged."""
        return self.lookup_binding(expr) if isinstance(expr, relax.Var) else expr

    def ours(self, expr: Any) -> OpCall | None:
        """The call of one of our operators that `expr` stands for; None where it is another expression."""
        return operators.parse(self.value(expr))

    def rewrite(self, call: relax.Call) -> Any:
        """The fused call, or None to leave `call` alone."""
        raise NotImplementedError

    def visit_call_(self, call: relax.Call) -> Any:
        """Visit a call, and replace it by the fused call where `rewrite` gives one."""
        call = super().visit_call_(call)
        fused = self.rewrite(call)
        return call if fused is None else self.builder_.normalize(fused)


def _is_op(expr: Any, name: str) -> bool:
    return _op_name(expr) == name


def _op_name(expr: Any) -> str:
    return str(expr.op.name) if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op) else ""


@relax.expr_functor.mutator
class _Residual(Fusion):
    def rewrite(self, call: relax.Call) -> Any:
        if not _is_op(call, "relax.add"):
            return None
        for addend, other in ((call.args[1], call.args[0]), (call.args[0], call.args[1])):
            found = self.ours(addend)
            job = _with_residual(found.job, str(other.ty.dtype)) if found is not None else None
            if found is not None and job is not None:
                return operators.rebuilt(job, {**found.named, "residual": other})
        return None


def _with_residual(job: GraphJob, dtype: str) -> GraphJob | None:
    """The job that also adds a residual of this dtype; None where the job cannot."""
    if (
        isinstance(job, Linear)
        and not (job.residual or job.gate or job.rows or job.softcap)
        and dtype == job.out_dtype
    ):
        return replace(job, residual=True)
    if isinstance(job, Norm) and not job.residual and dtype == "float32":
        return replace(job, residual=True)
    return None


@relax.expr_functor.mutator
class _Gate(Fusion):
    def rewrite(self, call: relax.Call) -> Any:
        if not _is_op(call, "relax.multiply"):
            return None
        found, up = self._activated(self.value(call.args[0])), self.value(call.args[1])
        if found is None:
            return None
        activation, gate = found
        if not (isinstance(gate, relax.TupleGetItem) and isinstance(up, relax.TupleGetItem)):
            return None
        if not (gate.index == 0 and up.index == 1 and gate.tuple_value.same_as(up.tuple_value)):
            return None
        split = self.value(gate.tuple_value)
        ours = self.ours(split.args[0]) if _is_op(split, "relax.split") else None
        if ours is None or not isinstance(ours.job, Linear) or ours.job.residual or ours.job.gate:
            return None
        return operators.rebuilt(replace(ours.job, gate=activation), ours.named)

    def _activated(self, expr: Any) -> tuple[Activation, Any] | None:
        """The activation that `expr` applies, and its argument; None where it applies none."""
        if _is_op(expr, "relax.square"):
            relu = self.value(expr.args[0])
            return ("relu2", self.value(relu.args[0])) if _is_op(relu, "relax.nn.relu") else None
        activation = ACTIVATIONS.get(_op_name(expr))
        return None if activation is None else (activation, self.value(expr.args[0]))


@relax.expr_functor.mutator
class _Norm(Fusion):
    def rewrite(self, call: relax.Call) -> Any:
        found = self.ours(call)
        if found is None or not isinstance(found.job, Linear) or found.job.norm is not None:
            return None
        norm = self.ours(found.named["x"])
        if norm is None or not isinstance(norm.job, Norm):
            return None
        if norm.job.residual or norm.job.groups > 1 or not norm.job.weight:
            return None
        x = norm.named["x"]
        fused = replace(found.job, norm=norm.job.eps, x_dtype=str(x.ty.dtype))
        return operators.rebuilt(fused, {**found.named, "x": x, "norm": norm.named["weight"]})


def _function_pass(name: str, fusion: type[Fusion]) -> Any:
    @tvm.transform.module_pass(opt_level=0, name=name)
    class Fusion:
        def transform_module(self, module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
            for global_var, func in module.functions_items():
                if isinstance(func, relax.Function):
                    module[global_var] = fusion(module).visit_expr(func)
            return module

    return Fusion


FuseResidual = _function_pass("FuseResidual", _Residual)
FuseGate = _function_pass("FuseGate", _Gate)
FuseNorm = _function_pass("FuseNorm", _Norm)
