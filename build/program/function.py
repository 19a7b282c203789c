"""A builder for a step's Relax function: its parameters, its values, and the bindings so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tvm import relax, tirx

from nearfar.format import buffers
from nearfar.format.kv import rows_of
from nearfar.format.manifest import Cache
from nearfar.format.sizes import MAX_STEP, pages_for
from nearfar.kernels.contract import Kernels
from nearfar.kernels.program import Precisions
from nearfar.kernels.quantized import Matrix
from nearfar.step.model import Model
from nearfar.step.operation import Op, reads


class StepFunction:
    """A builder for the function of `m` rows. `values`: the variable of each value of the list that has been
    made.
    """

    def __init__(
        self,
        model: Model,
        cache: Cache,
        kernels: Kernels,
        dtypes: Precisions,
        matrices: Mapping[str, Matrix],
        m: int,
    ) -> None:
        self.step, self.m, self.matrices = model.step, m, matrices
        self.symbols = {"context": tirx.Var("context", "int64")}
        self.values: dict[str, relax.Var] = {}
        self._cache, self._dtypes, self._kernels = cache, dtypes, kernels
        self._pages_per_slot = pages_for(model.context_length, cache.page_size)
        self._params = {param.name: param for param in model.step.params}
        self._narrow = _narrow_values(model.step.ops)
        self._builder = relax.BlockBuilder()
        self._vars: dict[str, relax.Var] = {}
        self._arguments: dict[str, str] = {}
        self._body: list[tuple[relax.Expr, relax.Var]] = []

    def add(self, op: Op, expr: relax.Expr) -> None:
        """Bind an operation's result to its name."""
        normal = self._builder.normalize(expr)
        self.values[op.out] = relax.DataflowVar(identifier(op.out), normal.ty)
        self._body.append((normal, self.values[op.out]))

    def finish(self) -> relax.Function:
        """Finish the function; its output is the last operation's result: logits or embeddings."""
        name, builder = f"step_{self.m}", self._builder
        with builder.function(name, list(self._vars.values())):
            with builder.dataflow():
                for expr, var in self._body[:-1]:
                    builder.emit_normalized(relax.VarBinding(var, builder.normalize(expr)))
                out = builder.emit_output(self._body[-1][0], self.step.ops[-1].op)
            builder.emit_func_output(out)
        return builder.get()[name]

    def arguments(self) -> dict[str, str]:
        """The plan argument that each parameter of the function stands for, by the parameter's name."""
        return {self._vars[name].name: argument for name, argument in self._arguments.items()}

    # -- for the functions of operations --

    def dtype(self, value: str) -> str:
        """The dtype of a value: the activations' where all its readers accept that, else float32."""
        return self._dtypes.activations if value in self._narrow else "float32"

    def wide_value(self, name: str) -> relax.Var:
        """The value cast to float32."""
        value = self.values[name]
        return (
            value
            if str(value.ty.dtype) == "float32"
            else self.bind(relax.op.astype(value, "float32"), "wide")
        )

    def narrow_value(self, name: str) -> relax.Var:
        """The value in the dtype of activations. In float16 it saturates, as kernels store it."""
        value, dtype = self.values[name], self._dtypes.activations
        if str(value.ty.dtype) == dtype:
            return value
        largest = float(np.finfo(dtype).max)
        bound = self.bind(relax.op.clip(value, -largest, largest), "bound")
        return self.bind(relax.op.astype(bound, dtype), "narrow")

    def bind(self, expr: Any, hint: str) -> relax.Var:
        """Bind an expression to a new variable."""
        normal = self._builder.normalize(expr)
        var = relax.DataflowVar(hint, normal.ty)
        self._body.append((normal, var))
        return var

    def split(self, x: relax.Var) -> tuple[Any, Any]:
        """The halves of the columns of x, as expressions."""
        halves = self.bind(relax.op.split(x, 2, axis=1), "halves")
        return relax.TupleGetItem(halves, 0), relax.TupleGetItem(halves, 1)

    def input(self, name: str, argument: str, shape: tuple[Any, ...], dtype: str) -> relax.Var:
        """Add a parameter to the function. `argument`: what it stands for in a plan."""
        if name not in self._vars:
            self._vars[name] = relax.Var(identifier(name), relax.TensorType(list(shape), dtype))
            self._arguments[name] = argument
        return self._vars[name]

    def buffer(self, name: str, shape: tuple[Any, ...], dtype: str) -> relax.Var:
        """Add a buffer of the format's table as a parameter."""
        return self.input(name, f"buffer:{name}", shape, dtype)

    def parts(self, param: str) -> list[relax.Var]:
        """Add the packed parts of a matrix as parameters."""
        parts = self._kernels.parts(self.matrices[param])
        names = [f"{param}.{part.name}" for part in parts]
        return [
            self.input(name, f"weight:{name}", part.shape, part.dtype)
            for name, part in zip(names, parts, strict=True)
        ]

    def vector(self, param: str) -> relax.Var:
        """Add a float32 vector as a parameter."""
        return self.input(param, f"weight:{param}", (self._params[param].n,), "float32")

    def optional(self, param: str | None) -> list[relax.Var]:
        """Add an optional vector as a parameter; gives a list of one variable, or of none."""
        return [] if param is None else [self.vector(param)]

    def paged(self, cache: int, heads: int) -> dict[str, Any]:
        """The fields that jobs over a cache share."""
        shape = self.step.caches[cache]
        return {
            "m": self.m,
            "heads": heads,
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            **self.geometry(),
            "dtype": self._dtypes.activations,
            "kv_dtype": self._dtypes.kv,
        }

    def geometry(self) -> dict[str, int]:
        """The fields about pages that all jobs over a cache share."""
        return {
            "page_size": self._cache.page_size, "slots": self._cache.slots,
            "pages_per_slot": self._pages_per_slot,
        }  # fmt: skip

    def where(self, cache: int) -> dict[str, relax.Var]:
        """The buffers with the rows' places in a cache, by their names as inputs of jobs."""
        table = buffers.page_table(self.step.group(cache))
        return {
            "positions": self.buffer("positions", (MAX_STEP,), "int32"),
            "slots": self.buffer("slots", (MAX_STEP,), "int32"),
            "page_table": self.buffer(table, (self._cache.slots, self._pages_per_slot), "int32"),
        }

    def kept(self, cache: int) -> relax.Var:
        """The buffer of a cache that keeps one tensor, or states: float32 [pages, heads, rows, head_dim]."""
        shape = self.step.caches[cache]
        (name,) = buffers.of_cache(cache, shape.parts)
        rows = shape.depth or self._cache.page_size
        return self.buffer(name, (self._pages(cache), shape.kv_heads, rows, shape.head_dim), "float32")

    def _pages(self, cache: int) -> tirx.Var:
        """The number of pages of a cache's group, a symbol."""
        extent = buffers.pages(self.step.group(cache))
        return self.symbols.setdefault(extent, tirx.Var(identifier(extent), "int64"))

    def kv(self, cache: int) -> dict[str, relax.Var]:
        """The buffers of a cache's keys and values, by their names as inputs of jobs."""
        shape = self.step.caches[cache]
        whole = (self._pages(cache), shape.kv_heads, self._cache.page_size, shape.head_dim)
        dtype, dims = rows_of(whole, self._dtypes.kv)
        names = {"k_cache": buffers.keys(cache), "v_cache": buffers.values(cache)}
        return {which: self.buffer(name, dims, dtype) for which, name in names.items()}


def _narrow_values(listed: tuple[Op, ...]) -> set[str]:
    """Names of the values that can have the activations' dtype: all operations that read them accept it
    (Op.half).
    """
    half = {name for op in listed if op.half for name in reads(op)}
    return half - {name for op in listed if not op.half for name in reads(op)}


def identifier(name: str) -> str:
    """Turn a name into an identifier, which TVMScript prints unchanged."""
    return name.replace(".", "_")
