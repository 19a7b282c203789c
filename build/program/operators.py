"""The project's own operators in Relax.

An operator is `R.call_dps_packed("nearfar.<kind>", (*tensors, R.str(<job as JSON>)), out)`: the job is a
record of `nearfar.kernels.jobs`, so a dumped module can be read, and a pass edits the record and the tensors
together.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import typing
from collections.abc import Sequence
from typing import Any, cast

from tvm import ir, relax

from nearfar.kernels.jobs import GraphJob

_RECORDS: dict[str, type[GraphJob]] = {kind.kind: kind for kind in typing.get_args(GraphJob)}


def call(job: GraphJob, tensors: Sequence[relax.Expr]) -> relax.Call:
    """Call the job's operator; tensors come in the order of the job's inputs."""
    text = json.dumps(dataclasses.asdict(job), separators=(",", ":"))
    shape, dtype = job.out
    out = relax.TensorType(list(shape), dtype)
    return relax.op.call_dps_packed(f"nearfar.{job.kind}", relax.Tuple([*tensors, ir.StringImm(text)]), out)


@dataclasses.dataclass(frozen=True)
class OpCall:
    """A parsed call of one of our operators."""

    job: GraphJob
    tensors: list[relax.Expr]

    @property
    def named(self) -> dict[str, relax.Expr]:
        """The tensors, by the names that the job gives its inputs."""
        parts = len(self.tensors) - len(self.job.inputs(0))
        return dict(zip(self.job.inputs(parts), self.tensors, strict=True))


def parse(expr: Any) -> OpCall | None:
    """The operator call that `expr` is, or None."""
    if (
        not isinstance(expr, relax.Call)
        or len(expr.args) < 2
        or not isinstance(expr.args[0], relax.ExternFunc)
    ):
        return None
    symbol = str(expr.args[0].global_symbol)
    kind = symbol.removeprefix("nearfar.")
    if symbol == kind or kind not in _RECORDS:
        return None
    *tensors, text = list(expr.args[1].fields)
    return OpCall(_decoded(_RECORDS[kind], json.loads(str(text.value))), tensors)


def calls(function: relax.Function) -> list[OpCall]:
    """The calls of our operators in a function."""
    found: list[OpCall] = []

    def visit(expr: relax.Expr) -> None:
        if (parsed := parse(expr)) is not None:
            found.append(parsed)

    relax.analysis.post_order_visit(function.body, visit)
    return found


def _decoded(record: type[Any], fields: dict[str, Any]) -> Any:
    inner = _inner(cast(type, record))

    def decoded(key: str, value: Any) -> Any:
        if isinstance(value, list):
            return tuple(decoded(key, item) for item in value)
        return _decoded(inner[key], value) if isinstance(value, dict) else value

    return record(**{key: decoded(key, value) for key, value in fields.items()})


@functools.cache
def _inner(record: type) -> dict[str, type[Any]]:
    """The classes of the records nested in a record, by field."""
    hints = typing.get_type_hints(record).items()
    kinds = ((name, kind) for name, hint in hints for kind in (hint, *typing.get_args(hint)))
    return {name: kind for name, kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)}


def rebuilt(job: GraphJob, named: dict[str, relax.Expr]) -> relax.Call:
    """Call a job's operator, with its tensors given by name."""
    parts = sum(name.startswith("w") and name[1:].isdigit() for name in named)
    return call(job, [named[name] for name in job.inputs(parts)])
