"""Activations that stand by themselves, by the formulas of a target where it has its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tvm import relax, te

from nearfar.kernels.contract import Formula

Rule = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


def rules(formulas: Mapping[str, Formula]) -> dict[str, Rule]:
    """Rules of LegalizeOps by the operator's name: its formula for each element, computed in float32."""
    return {operator: _rule(operator, formula) for operator, formula in formulas.items()}


def _rule(operator: str, formula: Formula) -> Rule:
    name = operator.rpartition(".")[2]

    def compute(x: te.Tensor) -> te.Tensor:
        wide = te.compute(x.shape, lambda *at: x[at].astype("float32"), "wide")
        return te.compute(x.shape, lambda *at: formula(wide[at]).astype(x.dtype), name)

    return lambda builder, call: builder.call_te(compute, call.args[0], primfunc_name_hint=name)
