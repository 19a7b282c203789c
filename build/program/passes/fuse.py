"""Fusions of our linear operator with its neighbours. Each edits the job record and the tensors together."""

from __future__ import annotations

import dataclasses
from typing import Any

import tvm
from tvm import relax

from nearfar.build.program import operators as ops
from nearfar.targets.jobs import Linear


class _LinearFusion(relax.PyExprMutator):
    """Walks one function, giving each binding's value to `rewrite` with a look at the bindings before it."""

    def value(self, expr: Any) -> Any:
        """What a variable is bound to so far."""
        return self.lookup_binding(expr) if isinstance(expr, relax.Var) else expr

    def linear(self, expr: Any) -> ops.OpCall | None:
        """The linear that `expr` stands for; None where it is not one."""
        found = ops.parse(self.value(expr))
        return found if found is not None and found.kind == ops.LINEAR else None

    def rewrite(self, call: relax.Call) -> Any:
        """The fused call, or None to leave `call` alone."""
        raise NotImplementedError

    def visit_call_(self, call: relax.Call) -> Any:
        call = super().visit_call_(call)
        fused = self.rewrite(call)
        return call if fused is None else self.builder_.normalize(fused)


def _is_op(expr: Any, name: str) -> bool:
    return isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op) and expr.op.name == name


def _output(call: relax.Call) -> tuple[list[int], str]:
    return [int(d) for d in call.ty.shape.values], str(call.ty.dtype)


@relax.expr_functor.mutator
class _Residual(_LinearFusion):
    def rewrite(self, call: relax.Call) -> Any:
        if not _is_op(call, "relax.add"):
            return None
        for linear, other in ((call.args[1], call.args[0]), (call.args[0], call.args[1])):
            found = self.linear(linear)
            if found is None or not isinstance(found.job, Linear):
                continue
            job = found.job
            if job.residual or job.gated or job.rows or str(other.ty.dtype) != job.out_dtype:
                continue
            return ops.call(
                ops.LINEAR, [*found.tensors, other], dataclasses.replace(job, residual=True), *_output(call)
            )
        return None


@relax.expr_functor.mutator
class _SiluGate(_LinearFusion):
    def rewrite(self, call: relax.Call) -> Any:
        if not _is_op(call, "relax.multiply"):
            return None
        silu, up = self.value(call.args[0]), self.value(call.args[1])
        if not _is_op(silu, "relax.nn.silu"):
            return None
        gate = self.value(silu.args[0])
        if not (isinstance(gate, relax.TupleGetItem) and isinstance(up, relax.TupleGetItem)):
            return None
        if not (gate.index == 0 and up.index == 1 and gate.tuple_value.same_as(up.tuple_value)):
            return None
        split = self.value(gate.tuple_value)
        found = self.linear(split.args[0]) if _is_op(split, "relax.split") else None
        if found is None or not isinstance(found.job, Linear) or found.job.residual or found.job.gated:
            return None
        return ops.call(ops.LINEAR, found.tensors, dataclasses.replace(found.job, gated=True), *_output(call))


@relax.expr_functor.mutator
class _Norm(_LinearFusion):
    def rewrite(self, call: relax.Call) -> Any:
        found = self.linear(call)
        if found is None or not isinstance(found.job, Linear) or found.job.norm is not None:
            return None
        job, norm = found.job, self.value(found.tensors[0])
        if not _is_op(norm, "relax.nn.rms_norm"):
            return None
        x, weight = norm.args
        head = [x, *found.tensors[1:2], weight] if job.rows else [x, weight]
        tail = found.tensors[2:] if job.rows else found.tensors[1:]
        fused = dataclasses.replace(job, norm=float(norm.attrs.epsilon), x_dtype=str(x.ty.dtype))
        return ops.call(ops.LINEAR, [*head, *tail], fused, *_output(call))


def _function_pass(name: str, fusion: type[_LinearFusion]) -> Any:
    @tvm.transform.module_pass(opt_level=0, name=name)
    class Fusion:
        def transform_module(self, module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
            for global_var, func in module.functions_items():
                if isinstance(func, relax.Function):
                    module[global_var] = fusion(module).visit_expr(func)
            return module

    return Fusion


FuseResidual = _function_pass("FuseResidual", _Residual)
FuseSiluGate = _function_pass("FuseSiluGate", _SiluGate)
FuseNorm = _function_pass("FuseNorm", _Norm)
