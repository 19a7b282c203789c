"""Small vectors that one kernel reads, as one tensor of the weight stream: a kernel has eight buffers."""

from __future__ import annotations

from nearfar.format.kv import rounding
from nearfar.step.model import Step
from nearfar.step.ops import Linear, Norm, RopeAppend

Bundles = dict[str, tuple[str, ...]]
"""By the name of the tensor the parameters whose values it holds, end to end."""


def bundles(step: Step, *, rounds: bool) -> Bundles:
    """What each projection to q, k and v takes besides its matrix: the norm before it, its bias, the norms of
    heads (jobs.Project). Where programs round keys (`rounds`), a second bundle has what rounding needs.

    A projection with one of them or none needs no tensor of its own.
    """
    made = {op.out: op for op in step.ops}
    found: Bundles = {}
    for op in step.ops:
        linear = made.get(op.x) if isinstance(op, RopeAppend) else None
        if not isinstance(op, RopeAppend) or not isinstance(linear, Linear):
            continue
        norm = made.get(linear.x)
        before = norm.weight if isinstance(norm, Norm) and norm.groups == 1 else None
        held = tuple(name for name in (before, linear.bias, op.q_norm, op.k_norm) if name is not None)
        if len(held) > 1:
            found[f"{linear.weight}.vectors"] = held
        if held and rounds and op.append:
            found[f"{linear.weight}.rounding"] = (*held, rounding(op.cache))
    return found
