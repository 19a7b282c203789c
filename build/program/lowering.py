"""The step's list in Relax: one function for each bucket of M rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvm import relax, tirx

from nearfar.build.program import operators
from nearfar.format import buffers
from nearfar.format.kv import rounding, rows_of
from nearfar.format.manifest import Cache
from nearfar.format.sizes import MAX_ROWS, MAX_STEP, pages_for
from nearfar.kernels import jobs
from nearfar.kernels.contract import Kernels
from nearfar.kernels.program import Precisions
from nearfar.kernels.quantized import Matrix
from nearfar.step import ops
from nearfar.step.model import Model
from nearfar.step.ops import Op, reads


@dataclass(frozen=True)
class Lowered:
    """A Relax function `step_<m>`, and the plan argument that each of its parameters stands for."""

    function: relax.Function
    arguments: Mapping[str, str]


def lower_step(
    model: Model, cache: Cache, kernels: Kernels, dtypes: Precisions, matrices: Mapping[str, Matrix], m: int
) -> Lowered:
    """The step for M rows. Inputs carry the names of buffers, weights are named `<param>.<part>`."""
    lowering = _Lowering(model, cache, kernels, dtypes, matrices, m)
    for op in model.step.ops:
        lowering.emit(op)
    return Lowered(lowering.finish(), lowering.arguments())


class _Lowering:
    """Reads the list: each operation becomes a call of an operator of ours, or of one of Relax's."""

    def __init__(
        self,
        model: Model,
        cache: Cache,
        kernels: Kernels,
        dtypes: Precisions,
        matrices: Mapping[str, Matrix],
        m: int,
    ) -> None:
        self._step, self._m, self._cache, self._dtypes = model.step, m, cache, dtypes
        self._pages_per_slot = pages_for(model.context_length, cache.page_size)
        self._kernels, self._matrices = kernels, matrices
        self._params = {param.name: param for param in model.step.params}
        self._narrow = _narrow_values(model.step.ops)
        self._builder = relax.BlockBuilder()
        self._vars: dict[str, relax.Var] = {}
        self._arguments: dict[str, str] = {}
        self._symbols = {"context": tirx.Var("context", "int64")}
        self._values: dict[str, relax.Var] = {}
        self._body: list[tuple[relax.Expr, relax.Var]] = []

    def emit(self, op: Op) -> None:
        """Add an operation."""
        expr = getattr(self, f"_{op.op}")(op)
        normal = self._builder.normalize(expr)
        self._values[op.out] = relax.DataflowVar(identifier(op.out), normal.ty)
        self._body.append((normal, self._values[op.out]))

    def finish(self) -> relax.Function:
        """The function; its output is the last operation's: logits or embeddings."""
        name, builder = f"step_{self._m}", self._builder
        with builder.function(name, list(self._vars.values())):
            with builder.dataflow():
                for expr, var in self._body[:-1]:
                    builder.emit_normalized(relax.VarBinding(var, builder.normalize(expr)))
                out = builder.emit_output(self._body[-1][0], self._step.ops[-1].op)
            builder.emit_func_output(out)
        return builder.get()[name]

    def arguments(self) -> dict[str, str]:
        """For each parameter's name in the function, the plan argument that it stands for."""
        return {self._vars[name].name: argument for name, argument in self._arguments.items()}

    # -- operations, by their names --

    def _embed(self, op: ops.Embed) -> Any:
        job = jobs.Embed(self._m, self._matrices[op.table], op.scale)
        return operators.call(job, [self._buffer("tokens", (MAX_STEP,), "int32"), *self._parts(op.table)])

    def _norm(self, op: ops.Norm) -> Any:
        x = self._values[op.x]
        width = int(x.ty.shape.values[1])
        job = jobs.Norm(self._m, width, op.eps, True, op.groups)
        return operators.call(job, [x, self._vector(op.weight)])

    def _linear(self, op: ops.Linear) -> Any:
        x = self._values[op.x]
        job = jobs.Linear(
            m=self._m,
            matrix=self._matrices[op.weight],
            x_dtype=str(x.ty.dtype),
            out_dtype=self._dtype(op.out),
            bias=op.bias is not None,
            x_rows=self._m,
        )
        return operators.call(job, [x, *self._parts(op.weight), *self._optional(op.bias)])

    def _rope_append(self, op: ops.RopeAppend) -> Any:
        job = jobs.RopeAppend(
            **self._paged(op.cache, op.heads),
            rope=op.rope is not None,
            norm_eps=op.eps if op.q_norm is not None else None,
            norm_all=op.norm_all,
            norm_after=op.norm_after,
            v_norm_eps=op.v_norm,
            q_scale=op.q_scale,
            append=op.append,
        )
        have = {"x": self._values[op.x], **self._where(op.cache), **self._kv(op.cache)}
        if op.rope is not None:
            have["rope"] = self._buffer(
                buffers.rope(op.rope), (self._symbols["context"], job.head_dim), "float32"
            )
        norms = {
            name: self._vector(weight)
            for name, weight in (("q_norm", op.q_norm), ("k_norm", op.k_norm))
            if weight
        }
        if job.rounds:
            name = rounding(op.cache)
            shape = (2 * job.kv_heads * job.head_dim,)
            have["k_rounding"] = self._input(name, f"weight:{name}", shape, "float32")
        return operators.rebuilt(job, have | norms)

    def _attend(self, op: ops.Attend) -> Any:
        job = jobs.Attend(
            **self._paged(op.cache, op.heads), scale=op.scale, window=op.window, softcap=op.softcap,
            sinks=op.sinks is not None,
        )  # fmt: skip
        have = {"q": self._values[op.x], **self._where(op.cache), **self._kv(op.cache)}
        return operators.rebuilt(job, have | ({"sinks": self._vector(op.sinks)} if op.sinks else {}))

    def _glu(self, op: ops.Glu) -> Any:
        gate, up = self._split(self._values[op.x])
        return relax.op.multiply(
            self._bind(self._activation(self._bind(gate, "gate"), op.activation), "act"),
            self._bind(up, "up"),
        )

    def _act(self, op: ops.Act) -> Any:
        return self._activation(self._values[op.x], op.activation)

    def _activation(self, x: relax.Var, activation: ops.Activation) -> Any:
        match activation:
            case "silu":
                return relax.op.nn.silu(x)
            case "gelu_tanh":
                return relax.op.nn.gelu_tanh(x)
            case "gelu_erf":
                return relax.op.nn.gelu(x)
            case "relu2":
                return relax.op.square(self._bind(relax.op.nn.relu(x), "relu"))

    def _add(self, op: ops.Add) -> Any:
        both = relax.op.add(self._wide_value(op.a), self._wide_value(op.b))
        return (
            both
            if op.scale == 1.0
            else relax.op.multiply(self._bind(both, "sum"), relax.const(op.scale, "float32"))
        )

    def _mul(self, op: ops.Mul) -> Any:
        return relax.op.multiply(self._wide_value(op.a), self._wide_value(op.b))

    def _scale(self, op: ops.Scale) -> Any:
        return relax.op.multiply(self._wide_value(op.x), self._vector(op.weight))

    def _columns(self, op: ops.Columns) -> Any:
        return relax.op.strided_slice(self._values[op.x], [1], [op.start], [op.start + op.count])

    def _logits(self, op: ops.Logits) -> Any:
        job = jobs.Linear(
            m=min(self._m, MAX_ROWS),
            matrix=self._matrices[op.weight],
            x_dtype="float32",
            out_dtype="float32",
            bias=op.bias is not None,
            rows=True,
            x_rows=self._m,
            softcap=op.softcap,
        )
        rows = self._buffer("logit_rows", (MAX_ROWS,), "int32")
        return operators.call(
            job, [self._values[op.x], rows, *self._parts(op.weight), *self._optional(op.bias)]
        )

    def _embedding(self, op: ops.Embedding) -> Any:
        rows = self._buffer("logit_rows", (MAX_ROWS,), "int32")
        return relax.op.take(self._wide_value(op.x), rows, axis=0, mode="clip")

    # -- what they are made of --

    def _dtype(self, value: str) -> str:
        return self._dtypes.activations if value in self._narrow else "float32"

    def _wide_value(self, name: str) -> relax.Var:
        """A value in float32."""
        value = self._values[name]
        return (
            value
            if str(value.ty.dtype) == "float32"
            else self._bind(relax.op.astype(value, "float32"), "wide")
        )

    def _bind(self, expr: Any, hint: str) -> relax.Var:
        normal = self._builder.normalize(expr)
        var = relax.DataflowVar(hint, normal.ty)
        self._body.append((normal, var))
        return var

    def _split(self, x: relax.Var) -> tuple[Any, Any]:
        halves = self._bind(relax.op.split(x, 2, axis=1), "halves")
        return relax.TupleGetItem(halves, 0), relax.TupleGetItem(halves, 1)

    def _input(self, name: str, argument: str, shape: tuple[Any, ...], dtype: str) -> relax.Var:
        if name not in self._vars:
            self._vars[name] = relax.Var(identifier(name), relax.TensorType(list(shape), dtype))
            self._arguments[name] = argument
        return self._vars[name]

    def _buffer(self, name: str, shape: tuple[Any, ...], dtype: str) -> relax.Var:
        return self._input(name, f"buffer:{name}", shape, dtype)

    def _parts(self, param: str) -> list[relax.Var]:
        parts = self._kernels.parts(self._matrices[param])
        names = [f"{param}.{part.name}" for part in parts]
        return [
            self._input(name, f"weight:{name}", part.shape, part.dtype)
            for name, part in zip(names, parts, strict=True)
        ]

    def _vector(self, param: str) -> relax.Var:
        return self._input(param, f"weight:{param}", (self._params[param].n,), "float32")

    def _optional(self, param: str | None) -> list[relax.Var]:
        return [] if param is None else [self._vector(param)]

    def _paged(self, cache: int, heads: int) -> dict[str, Any]:
        """The fields that jobs over a cache share."""
        shape = self._step.caches[cache]
        return {
            "m": self._m,
            "heads": heads,
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "page_size": self._cache.page_size,
            "slots": self._cache.slots,
            "pages_per_slot": self._pages_per_slot,
            "dtype": self._dtypes.activations,
            "kv_dtype": self._dtypes.kv,
        }

    def _where(self, cache: int) -> dict[str, relax.Var]:
        table = buffers.page_table(self._step.group(cache))
        return {
            "positions": self._buffer("positions", (MAX_STEP,), "int32"),
            "slots": self._buffer("slots", (MAX_STEP,), "int32"),
            "page_table": self._buffer(table, (self._cache.slots, self._pages_per_slot), "int32"),
        }

    def _kv(self, cache: int) -> dict[str, relax.Var]:
        extent = buffers.pages(self._step.group(cache))
        count = self._symbols.setdefault(extent, tirx.Var(identifier(extent), "int64"))
        shape = self._step.caches[cache]
        whole = (count, shape.kv_heads, self._cache.page_size, shape.head_dim)
        dtype, dims = rows_of(whole, self._dtypes.kv)
        names = {"k_cache": buffers.keys(cache), "v_cache": buffers.values(cache)}
        return {which: self._buffer(name, dims, dtype) for which, name in names.items()}


def _narrow_values(listed: tuple[Op, ...]) -> set[str]:
    """Values of the activations' dtype, all others are float32: those that only attention or a gate reads.

    So the residual stream and what is normalized on its way there keep their range (docs/decisions/0003).
    """
    inside: set[str] = set()
    outside: set[str] = set()
    for op in listed:
        (inside if isinstance(op, ops.RopeAppend | ops.Attend | ops.Glu) else outside).update(reads(op))
    return inside - outside


def identifier(name: str) -> str:
    """A name that TVMScript prints as it is."""
    return name.replace(".", "_")
