"""Lowers our operators to the target's kernels: each becomes the launches (`Staged`) that the target gives
for its job.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import tvm
from tvm import relax, tirx

from nearfar.build.program import operators
from nearfar.kernels.contract import SCRATCH, Kernels, Stage, Staged
from nearfar.kernels.jobs import GraphJob

_OPAQUE = 8  # TVM's OpPatternKind.kOpaque: never fused with neighbours


class KernelTable:
    """The kernels of a program: one PrimFunc for each distinct job, shared by all layers and named after the
    job.

    Labels leave out fields in which most jobs agree; a number distinguishes jobs that differ only in these.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._made: dict[GraphJob, tuple[str, Staged]] = {}
        self._named: Counter[str] = Counter()

    def get(self, job: GraphJob) -> tuple[str, Staged]:
        """The kernel name and the launches of a job, made at the first call."""
        if job not in self._made:
            self._named[job.label] += 1
            count = self._named[job.label]
            name = job.label if count == 1 else f"{job.label}_v{count}"
            self._made[job] = (name, self._kernels.stages(job))
        return self._made[job]


@relax.expr_functor.mutator
class _Lower(relax.PyExprMutator):
    def __init__(self, module: tvm.IRModule, table: KernelTable) -> None:
        super().__init__(module)
        self._table = table
        self._global_vars: dict[str, tvm.ir.GlobalVar] = {}

    def visit_call_(self, call: relax.Call) -> Any:
        call = super().visit_call_(call)
        found = operators.parse(call)
        if found is None:
            return call
        name, staged = self._table.get(found.job)
        tensors: dict[str, Any] = dict(found.named)
        for kernel, stage in staged.named(name):
            outputs = [a for a in stage.args if a not in tensors]
            if not outputs:  # an earlier stage has written the other part of the output
                result = self._in_place(kernel, stage, tensors)
                outputs = [stage.args[-1]]
            else:
                result = self._fresh(kernel, stage, outputs, staged, call, tensors)
            if stage is staged.stages[-1] and len(outputs) == 1:
                return self.builder_.normalize(result)
            var = self.builder_.emit(result)
            for position, output in enumerate(outputs):
                item = var if len(outputs) == 1 else relax.TupleGetItem(var, position)
                tensors[output] = self.builder_.emit(item) if len(outputs) > 1 else item
        return tensors[staged.stages[-1].args[-1]]

    def _fresh(
        self, kernel: str, stage: Stage, outputs: list[str], staged: Staged, call: relax.Call,
        tensors: dict[str, Any],
    ) -> relax.Call:  # fmt: skip
        """Make a launch that writes new tensors."""
        if list(stage.args[len(stage.args) - len(outputs) :]) != outputs:
            raise AssertionError(f"{kernel}: outputs must be the last arguments, got {stage.args}")
        types = [_scratch_type(staged, a) if a.startswith(SCRATCH) else call.ty for a in outputs]
        inputs = [tensors[a] for a in stage.args if a in tensors]
        return relax.call_tir(self._global(kernel, stage.func), inputs, out_ty=types)

    def _in_place(self, kernel: str, stage: Stage, tensors: dict[str, Any]) -> relax.Call:
        """Make a launch that writes another part of its last argument, which an earlier stage has made."""
        inputs = [tensors[a] for a in stage.args]
        last = len(inputs) - 1
        return relax.op.call_tir_inplace(
            self._global(kernel, stage.func), inputs, [last], out_ty=[inputs[last].ty]
        )

    def _global(self, name: str, func: tirx.PrimFunc) -> tvm.ir.GlobalVar:
        if name not in self._global_vars:
            # The function gets its name before it is added: of structurally equal functions the builder keeps
            # only the first, but each plan needs the shapes of its own function.
            named = func.with_attr("global_symbol", name).with_attr("op_pattern", _OPAQUE)
            self._global_vars[name] = self.builder_.add_func(named, name)
        return self._global_vars[name]


def _scratch_type(staged: Staged, name: str) -> relax.TensorType:
    shape, dtype = staged.scratch[int(name.removeprefix(SCRATCH))]
    return relax.TensorType(list(shape), dtype)


def LowerOperators(kernels: Kernels) -> Any:
    """Make the pass. It visits functions in name order, so that names and order of kernels are the same every
    time.
    """

    @tvm.transform.module_pass(opt_level=0, name="LowerOperators")
    class Lower:
        def transform_module(self, module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
            mutator = _Lower(module, KernelTable(kernels))
            for global_var, func in sorted(module.functions_items(), key=lambda item: str(item[0].name_hint)):
                if isinstance(func, relax.Function):
                    mutator.builder_.update_func(global_var, mutator.visit_expr(func))
            return mutator.builder_.get()

    return Lower()
