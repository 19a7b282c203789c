"""Bundles: small vectors that one kernel reads, joined into one tensor of the weight stream; a kernel has
only eight buffers.
"""

from __future__ import annotations

from nearfar.format.kv import rounding
from nearfar.step.model import Step
from nearfar.step.ops import Linear, Norm, RopeAppend

Bundles = dict[str, tuple[str, ...]]
"""For each bundle's tensor, by name, the parameters whose values it holds, end to end."""


def bundles(step: Step, *, rounds_keys: bool) -> Bundles:
    """The bundles of a step: for each projection to q, k and v the norm before it, its bias and the norms of
    heads (jobs.Project).

    If programs round keys (`rounds_keys`), a second bundle adds the rounding weights. A projection with at
    most one such vector needs no bundle.
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
        if held and rounds_keys and op.append:
            found[f"{linear.weight}.rounding"] = (*held, rounding(op.cache))
    return found
