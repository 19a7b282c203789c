"""The shell that every architecture file emits its step through: inputs, weights, operators."""

from __future__ import annotations

import dataclasses
from typing import Any

from tvm import relax, tirx

from nearfar.build.program import operators as ops
from nearfar.format.sizes import MAX_ROWS, MAX_STEP, CacheLayout
from nearfar.step.config import ModelConfig
from nearfar.targets.jobs import Attention, Linear
from nearfar.targets.kernels import Kernels, Precision
from nearfar.targets.quantized import Matrix


class StepGraph:
    """Builds the Relax function `step_<m>` for one bucket of M rows.

    Inputs carry the buffer names of docs/artifact.md, weights are named `<param>.<part>`; both become variables of
    the function when they are first used, so a plan's arguments can be read off the variables' names.
    """

    def __init__(
        self,
        config: ModelConfig,
        cache: CacheLayout,
        kernels: Kernels,
        precision: Precision,
        matrices: dict[str, Matrix],
        biases: frozenset[str],
        m: int,
    ) -> None:
        self.config, self.m, self.rows = config, m, min(m, MAX_ROWS)
        self._kernels, self._matrices, self._biases, self._cache = kernels, matrices, biases, cache
        self._act = kernels.activation_dtype(precision)
        self._kv_dtype = "float16" if precision == "f16" else "float32"
        self._builder = relax.BlockBuilder()
        self._vars: dict[str, relax.Var] = {}
        self._pages, self._context = tirx.Var("pages", "int64"), tirx.Var("context", "int64")
        self._body: list[tuple[relax.Expr, relax.Var]] = []
        self._output: relax.Var | None = None

    # -- operators, as the architecture files use them --

    def embed(self, param: str) -> relax.Var:
        """Token rows of the embedding: float32 [m, hidden]."""
        matrix = self._matrices[param]
        tensors = [self._input("tokens", (MAX_STEP,), "int32"), *self._parts(param)]
        return self._emit(ops.call(ops.EMBED, tensors, matrix, (self.m, matrix.k), "float32"), "x")

    def norm(self, x: relax.Var, param: str, eps: float) -> relax.Var:
        """RMS norm (Zhang & Sennrich, 2019) over the last axis, float32."""
        weight = self._input(param, (self.config.hidden_size,), "float32")
        return self._emit(relax.op.nn.rms_norm(x, weight, axes=[-1], epsilon=eps), "normed")

    def linear(self, x: relax.Var, param: str, *, residual_stream: bool = False) -> relax.Var:
        """x·Wᵀ (+ bias where the model has one): [m, n], float32 where it joins the residual stream."""
        matrix, bias = self._matrices[param], f"{param}.bias" in self._biases
        job = Linear(
            m=self.m,
            matrix=matrix,
            x_dtype=str(x.ty.dtype),
            out_dtype="float32" if residual_stream else self._act,
            bias=bias,
            x_rows=self.m,
        )
        tensors = [x, *self._parts(param)]
        tensors += [self._input(f"{param}.bias", (matrix.n,), "float32")] if bias else []
        return self._emit(ops.call(ops.LINEAR, tensors, job, (self.m, matrix.n), job.out_dtype), param.split(".")[-1])

    def rope_append(self, qkv: relax.Var, layer: int) -> relax.Var:
        """Normalize q and k where the model does, rotate them by position, append k and v to the layer's cache; returns q."""
        rope = self._input("rope", (self._context, self.config.head_dim), "float32")
        norms = [f"layers.{layer}.{which}_norm" for which in "qk"] if self.config.qk_norm else []
        tensors = [qkv, *self._where(), rope]
        tensors += [*(self._input(name, (self.config.head_dim,), "float32") for name in norms), *self._kv(layer)]
        job = dataclasses.replace(self._attention(), qk_norm=self.config.norm_eps if norms else None)
        return self._emit(ops.call(ops.ROPE_APPEND, tensors, job, self._q_shape(), self._act), "q")

    def attention(self, q: relax.Var, layer: int) -> relax.Var:
        """Causal attention of the rows over their sequences' pages. `q` comes from rope_append, which orders the two."""
        tensors = [q, *self._kv(layer), *self._where()]
        return self._emit(ops.call(ops.ATTENTION, tensors, self._attention(), self._q_shape(), self._act), "attended")

    def add(self, a: relax.Var, b: relax.Var) -> relax.Var:
        """Sum, elementwise."""
        return self._emit(relax.op.add(a, b), "x")

    def silu_gate(self, gate_up: relax.Var) -> relax.Var:
        """SwiGLU (Shazeer, 2020) of stacked columns [gate | up]."""
        halves = self._emit(relax.op.split(gate_up, 2, axis=1), "halves")
        gate = self._emit(relax.TupleGetItem(halves, 0), "gate")
        up = self._emit(relax.TupleGetItem(halves, 1), "up")
        return self._emit(relax.op.multiply(self._emit(relax.op.nn.silu(gate), "silu"), up), "gated")

    def logits(self, x: relax.Var, norm_param: str, head_param: str) -> None:
        """Final norm and head for the rows that `logit_rows` names: the function's output, float32 [16, vocab]."""
        matrix = self._matrices[head_param]
        normed = self.norm(x, norm_param, self.config.norm_eps)
        job = Linear(m=self.rows, matrix=matrix, x_dtype="float32", out_dtype="float32", rows=True, x_rows=self.m)
        tensors = [normed, self._input("logit_rows", (MAX_ROWS,), "int32"), *self._parts(head_param)]
        self._output = self._emit(ops.call(ops.LINEAR, tensors, job, (MAX_ROWS, matrix.n), "float32"), "logits")

    # -- the finished function --

    def arguments(self) -> dict[str, str]:
        """For each parameter's name in the finished function, the plan argument it stands for."""
        buffers = {"tokens", "positions", "slots", "page_table", "logit_rows", "rope"}
        return {
            var.name: f"buffer:{name}" if name in buffers or name.startswith("kv.") else f"weight:{name}"
            for name, var in self._vars.items()
        }

    def finish(self) -> relax.Function:
        """The function `step_<m>`."""
        if self._output is None:
            raise AssertionError("an architecture's step must end in logits")
        builder = self._builder
        with builder.function(f"step_{self.m}", list(self._vars.values())):
            with builder.dataflow():
                for expr, var in self._body[:-1]:
                    builder.emit_normalized(relax.VarBinding(var, builder.normalize(expr)))
                out = builder.emit_output(self._body[-1][0], "logits")
            builder.emit_func_output(out)
        return builder.get()[f"step_{self.m}"]

    def _emit(self, expr: relax.Expr, hint: str) -> relax.Var:
        normal = self._builder.normalize(expr)
        var = relax.DataflowVar(hint, normal.ty)
        self._body.append((normal, var))
        return var

    def _input(self, name: str, shape: tuple[Any, ...], dtype: str) -> relax.Var:
        if name not in self._vars:
            self._vars[name] = relax.Var(name, relax.TensorType(list(shape), dtype))
        return self._vars[name]

    def _parts(self, param: str) -> list[relax.Var]:
        return [
            self._input(f"{param}.{part.name}", part.shape, part.dtype)
            for part in self._kernels.parts(self._matrices[param])
        ]

    def _kv(self, layer: int) -> list[relax.Var]:
        shape = (self._pages, self.config.kv_heads, self._cache.page_size, self.config.head_dim)
        return [self._input(f"kv.{layer}.{which}", shape, self._kv_dtype) for which in "kv"]

    def _where(self) -> list[relax.Var]:
        table = (self._cache.slots, self._cache.pages_per_slot)
        return [
            self._input("positions", (MAX_STEP,), "int32"),
            self._input("slots", (MAX_STEP,), "int32"),
            self._input("page_table", table, "int32"),
        ]

    def _q_shape(self) -> tuple[int, int]:
        return (self.m, self.config.heads * self.config.head_dim)

    def _attention(self) -> Attention:
        config = self.config
        return Attention(
            m=self.m,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            page_size=self._cache.page_size,
            slots=self._cache.slots,
            pages_per_slot=self._cache.pages_per_slot,
            dtype=self._act,
            kv_dtype=self._kv_dtype,
            scale=config.head_dim**-0.5,
        )
