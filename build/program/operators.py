"""The project's own operators in Relax.

An operator is `R.call_dps_packed("nearfar.<kind>", (*tensors, R.str(<job as JSON>)), out)`: the job is a record of
`nearfar.targets.base`, so a dumped module can be read, and a pass edits the record and the tensors together.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from tvm import ir, relax

from nearfar.targets.jobs import Attention, Linear
from nearfar.targets.quantized import Matrix

Job = Linear | Attention | Matrix

LINEAR, EMBED, ROPE_APPEND, ATTENTION = "linear", "embed", "rope_append", "attention"
_RECORDS: dict[str, type[Job]] = {LINEAR: Linear, EMBED: Matrix, ROPE_APPEND: Attention, ATTENTION: Attention}


def call(kind: str, tensors: Sequence[relax.Expr], job: Job, shape: Sequence[int], dtype: str) -> relax.Call:
    """A call of operator `kind` with output `shape`, `dtype`."""
    text = json.dumps(dataclasses.asdict(job), separators=(",", ":"))
    out = relax.TensorType(list(shape), dtype)
    return relax.op.call_dps_packed(f"nearfar.{kind}", relax.Tuple([*tensors, ir.StringImm(text)]), out)


@dataclasses.dataclass(frozen=True)
class OpCall:
    """A parsed call of one of our operators."""

    kind: str
    tensors: list[relax.Expr]
    job: Job


def parse(expr: Any) -> OpCall | None:
    """The operator call that `expr` is, or None."""
    if not isinstance(expr, relax.Call) or len(expr.args) < 2 or not isinstance(expr.args[0], relax.ExternFunc):
        return None
    symbol = str(expr.args[0].global_symbol)
    kind = symbol.removeprefix("nearfar.")
    if symbol == kind or kind not in _RECORDS:
        return None
    *tensors, text = list(expr.args[1].fields)
    values = json.loads(str(text.value))
    if kind == LINEAR:
        values["matrix"] = Matrix(**values["matrix"])
    return OpCall(kind, tensors, _RECORDS[kind](**values))


def param_names(call: OpCall) -> list[str]:
    """Names of the call's tensors in order, as `nearfar.targets.base.Kernels` lists them (inputs only)."""
    if isinstance(call.job, Linear):
        return _linear_names(call.job, len(call.tensors))
    if call.kind == EMBED:
        return ["tokens", *(f"w{i}" for i in range(len(call.tensors) - 1))]
    if call.kind == ROPE_APPEND:
        assert isinstance(call.job, Attention)
        norms = ["q_norm", "k_norm"] * (call.job.qk_norm is not None)
        return ["qkv", "positions", "slots", "page_table", "rope", *norms, "k_cache", "v_cache"]
    return ["q", "k_cache", "v_cache", "positions", "slots", "page_table"]


def _linear_names(job: Linear, count: int) -> list[str]:
    head = ["x"] + ["logit_rows"] * job.rows + ["norm"] * (job.norm is not None)
    tail = ["bias"] * job.bias + ["residual"] * job.residual
    return head + [f"w{i}" for i in range(count - len(head) - len(tail))] + tail
