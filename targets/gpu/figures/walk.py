"""Runs a lowered kernel without a GPU: it computes integers for all threads at once, and counts the cost of
everything else.

Indices, loop bounds and conditions are integers, computed for every sampled thread (lanes.py). Values loaded
from weights, activations and caches are data, which the figures do not need: None. Each loop body is walked
once, with its iterations as an axis. A while loop counts as one turn. A condition on data counts as true on
both sides, unless the kernel marks it SELDOM.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from nearfar.targets.gpu.tir_passes import SELDOM

from .lanes import BASE, Array, Lanes, Mask, all_workgroups, chosen_workgroups, even_workgroups
from .reads import Reads
from .trace import Trace, TracedBuffer, VectorType, kind_of, parameter_of, shape_of

Value = int | Array | None
"""The value of an integer or a boolean; None: data, or unknown."""

_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Div": operator.floordiv,
    "Mod": operator.mod, "FloorDiv": operator.floordiv, "FloorMod": operator.mod, "Min": np.minimum,
    "Max": np.maximum, "BitwiseAnd": operator.and_, "BitwiseOr": operator.or_, "BitwiseXor": operator.xor,
    "LShift": operator.lshift, "RShift": operator.rshift, "EQ": operator.eq, "NE": operator.ne,
    "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge, "And": np.logical_and,
    "Or": np.logical_or,
}  # fmt: skip
_BINARY_CALLS = {
    "bitwise_and": "BitwiseAnd", "bitwise_or": "BitwiseOr", "bitwise_xor": "BitwiseXor",
    "shift_left": "LShift", "shift_right": "RShift",
}  # fmt: skip
_EMPTY = -1
"""The value of workgroup memory to which nothing was stored."""
_FREE = (
    "reinterpret", "likely", "tvm_thread_invariant", "large_uint_imm", "workgroup_uniform", "address_of",
)  # fmt: skip
"""Calls that cost no instruction."""


@dataclass
class LoadStretch:
    """The loads of streamed buffers between two waits (a barrier, a loop's border)."""

    loads: float | np.ndarray[Any, np.dtype[np.float64]] = 0.0
    loaded: float | np.ndarray[Any, np.dtype[np.float64]] = 0.0


class Walk:
    """One walk over a kernel.

    `streamed`: parameters whose loads are followed. `contents`: the values that the host writes to integer
    parameters, 0 by default. `probing`: walk all workgroups, but only the first thread of each.
    """

    def __init__(
        self,
        func: tirx.PrimFunc,
        streamed: frozenset[str],
        contents: Mapping[str, Array],
        probing: bool = False,
    ) -> None:
        self._probing = probing
        self.trace = Trace()
        self._func, self._streamed, self._contents = func, streamed, contents
        self._variables: dict[Any, Value] = {}
        self._memory: dict[Any, TracedBuffer] = {}
        self._locals: dict[tuple[Any, int], Value] = {}
        self._shared: dict[Any, Array] = {}
        self._lanes = Lanes(all_workgroups((1, 1, 1)), 1)
        self._stretch = LoadStretch()
        self._busy: Any = 0.0
        self._sequence: Any = 0.0
        self._waits: Any = 0.0
        self._kinds: dict[Any, VectorType] = {}
        self._by_class: dict[str, Callable[[Any], None]] = {
            "SeqStmt": self._each, "AttrStmt": self._attribute, "DeclBuffer": self._declare,
            "AllocBuffer": self._allocate, "Bind": self._bind, "BufferStore": self._store, "For": self._for,
            "While": self._while, "IfThenElse": self._if, "Evaluate": self._evaluate,
        }  # fmt: skip
        self._by_expression: dict[str, Callable[[Any], Value]] = {
            **dict.fromkeys(_BINARY, self._binary), "IntImm": lambda e: int(e.value),
            "FloatImm": lambda _: None, "StringImm": lambda _: None, "Var": self._variables.get,
            "Cast": self._cast, "Not": self._not, "BitwiseNot": self._unary, "Select": self._select,
            "Ramp": self._ramp, "Broadcast": lambda e: self._value(e.value), "Shuffle": self._shuffle,
            "Let": self._let, "TensorLoad": self._load, "Call": self._call,
        }  # fmt: skip

    def run(self) -> Trace:
        """Walk the function."""
        for parameter in self._func.params:
            self._memory[parameter] = memory = parameter_of(parameter)
            self.trace.parameters[memory.name] = memory
        extents = _extents(self._func.body)
        trace = self.trace
        trace.grid = extents["blockIdx.x"], extents["blockIdx.y"], extents["blockIdx.z"]
        trace.workgroup = extents["threadIdx.x"], extents["threadIdx.y"], extents["threadIdx.z"]
        self._lanes = self._looked_at()
        self._statement(self._func.body)
        self._wait()
        trace.loaded_by_one, trace.steps = float(np.max(self._busy)), float(np.max(self._sequence))
        trace.barriers = float(np.max(self._waits))
        return trace

    def _looked_at(self) -> Lanes:
        """The sampled workgroups. If the host's integers decide how much a workgroup does, a walk over first
        threads finds that out.
        """
        grid, threads = self.trace.grid, math.prod(self.trace.workgroup)
        if self._probing:
            return Lanes(all_workgroups(grid), 1)
        if self._contents.keys().isdisjoint(self.trace.parameters):
            return Lanes(even_workgroups(grid), threads)
        probe = Walk(self._func, self._streamed, self._contents, probing=True)
        probe.run()
        work = np.broadcast_to(probe._busy, (math.prod(grid), 1))
        return Lanes(chosen_workgroups(work[:, 0]), threads)

    # Statements

    def _statement(self, node: Any) -> None:
        made = self._by_class.get(type(node).__name__)
        if made is not None:  # assertions and returns have no figure
            made(node)

    def _each(self, node: Any) -> None:
        for child in node.seq:
            self._statement(child)

    def _attribute(self, node: Any) -> None:
        if str(node.attr_key) == "thread_extent":
            self._variables[node.node.var] = self._thread(str(node.node.thread_tag))
        if str(node.attr_key) != SELDOM:
            self._statement(node.body)

    def _thread(self, tag: str) -> Value:
        assert not self._lanes.loops, "threads are bound outside of all loops"
        kind, axis = tag.split(".")
        of_grid = kind == "blockIdx"
        x, y, _ = self.trace.grid if of_grid else self.trace.workgroup
        flat = self._lanes.values(1 if of_grid else 0)
        return {"x": flat % x, "y": flat // x % y, "z": flat // (x * y)}[axis]

    def _declare(self, node: Any) -> None:
        """Declare another name for a buffer, possibly with other vectors."""
        data = node.data if not hasattr(node.data, "args") else node.data.args[0]
        below = self._memory[data]
        kind, shape = kind_of(node.buffer), shape_of(node.buffer)
        self._memory[node.buffer] = TracedBuffer(below.name, below.scope, kind, shape)

    def _allocate(self, node: Any) -> None:
        buffer = node.buffer
        memory = TracedBuffer(str(buffer.name), str(buffer.scope()), kind_of(buffer), shape_of(buffer))
        self._memory[buffer] = memory
        if memory.scope.startswith("shared"):
            self.trace.shared_bytes += memory.size

    def _bind(self, node: Any) -> None:
        self._variables[node.var] = self._value(node.value)

    def _store(self, node: Any) -> None:
        value, index = self._value(node.value), self._value(node.indices[0])
        memory = self._memory[node.buffer]
        if memory.scope == "global":
            stored = VectorType.of(node.value).size * self._lanes.total()
            self.trace.written[memory.name] = self.trace.written.get(memory.name, 0.0) + stored
        elif memory.kind.name == "int" and index is not None:
            if memory.scope.startswith("shared"):
                self._store_shared(node.buffer, memory, index, value)
            elif isinstance(index, int):
                self._store_local((node.buffer, index), value)

    def _store_local(self, place: tuple[Any, int], value: Value) -> None:
        mask, before = self._lanes.mask, self._locals.get(place)
        if mask is not None and value is not None and before is not None:
            value = np.where(mask, value, before)
        self._locals[place] = value

    def _store_shared(self, buffer: Any, memory: TracedBuffer, index: Value, value: Value) -> None:
        """Store to workgroup memory, kept as an array whose last axis (that of the threads) is the memory's
        elements.
        """
        shape = self._lanes.shape
        before = self._shared.get(buffer)
        if before is None:
            before = np.full(memory.elements, _EMPTY)
        held = np.array(np.broadcast_to(before, (*shape[:-1], before.shape[-1])))
        at = np.broadcast_to(np.clip(np.asarray(index), 0, memory.elements - 1), shape)
        put = np.broadcast_to(np.asarray(0 if value is None else value), shape)
        if self._lanes.mask is not None:
            active = np.broadcast_to(self._lanes.mask, shape)
            where = np.nonzero(active)
            held[(*where[:-1], at[active])] = put[active]
        else:
            np.put_along_axis(held, at, put, axis=-1)
        self._shared[buffer] = held

    def _for(self, node: Any) -> None:
        start, extent = self._value(node.min), self._value(node.extent)
        most = 1 if extent is None else int(np.max(extent))
        if most <= 0:
            return
        self._wait()
        outside, before = self._lanes.loops + BASE, dict(self._shared)
        with self._lanes.loop(most) as turn:
            self._variables[node.loop_var] = turn + (0 if start is None else start)
            inside = turn < extent if isinstance(extent, np.ndarray) and extent.size > 1 else None
            with self._lanes.where(inside) as any_active:
                if any_active:
                    self._statement(node.body)
                    self._wait()
        for kept in (self._locals, self._variables):  # values of the loop's last turn
            for key, value in kept.items():
                if isinstance(value, np.ndarray) and value.ndim > outside:
                    kept[key] = value[-1]
        for buffer, turns in self._shared.items():  # each turn of the loop may fill a part of the buffer
            if turns.ndim > outside:
                self._shared[buffer] = _filled(before.get(buffer, np.array(_EMPTY)), turns)

    def _while(self, node: Any) -> None:
        self._wait()
        self._value(node.condition)
        self._statement(node.body)
        self._wait()

    def _if(self, node: Any) -> None:
        condition = self._value(node.condition)
        if isinstance(condition, int | np.bool_ | bool):
            case = node.then_case if condition else node.else_case
            if case is not None:
                self._statement(case)
            return
        for case, mask in ((node.then_case, condition), (node.else_case, _not(condition))):
            if case is not None:
                with self._lanes.where(_mask(mask)) as any_active:
                    if any_active:
                        self._statement(case)

    def _evaluate(self, node: Any) -> None:
        name = _name(node.value)
        if name == "tvm_storage_sync":
            self._wait()
            self._waits = self._waits + self._lanes.per_thread(self._lanes.each())
        elif name is not None:
            self._value(node.value)

    def _wait(self) -> None:
        """End a stretch, and add up its loads."""
        stretch, lanes = self._stretch, self._lanes
        if np.any(stretch.loads):
            whole = np.broadcast_to(stretch.loaded, lanes.shape)
            launch = (whole * lanes.weights(lanes.loops, lanes.loops + BASE)).sum(axis=tuple(range(-BASE, 0)))
            self.trace.in_flight = max(self.trace.in_flight, float(launch.max()))
            self.trace.loads_ahead = max(self.trace.loads_ahead, float(np.max(stretch.loads)))
            self._busy = self._busy + lanes.per_thread(whole)
            loading = np.broadcast_to(np.asarray(stretch.loads) > 0, lanes.shape)
            self._sequence = self._sequence + lanes.per_thread(loading.astype(np.float64))
        self._stretch = LoadStretch()

    # Expressions

    def _value(self, expr: Any) -> Value:
        made = self._by_expression.get(type(expr).__name__)
        return None if made is None else made(expr)

    def _data(self, expr: Any, operations: float = 1.0) -> None:
        """Count an operation on data."""
        self.trace.operations += operations * VectorType.of(expr).cost * self._lanes.total()

    def _binary(self, expr: Any) -> Value:
        a, b = self._value(expr.a), self._value(expr.b)
        if a is None or b is None:
            self._data(expr)
            return None
        return _compute(type(expr).__name__, a, b)

    def _unary(self, expr: Any) -> Value:
        self._value(expr.a)
        self._data(expr)
        return None

    def _not(self, expr: Any) -> Value:
        return _not(self._value(expr.a))

    def _cast(self, expr: Any) -> Value:
        value = self._value(expr.value)
        integers = {"int", "uint", "bool"}
        into, of = VectorType.of(expr).name, VectorType.of(expr.value).name
        if value is not None and into in integers:
            return value
        if not (into in integers and of in integers):
            self._data(expr)
        return None

    def _select(self, expr: Any) -> Value:
        condition = self._value(expr.condition)
        a, b = self._value(expr.true_value), self._value(expr.false_value)
        if condition is None or a is None or b is None:
            self._data(expr)
            return None
        return np.where(condition, a, b)

    def _ramp(self, expr: Any) -> Value:
        self._value(expr.stride)
        return self._value(expr.base)

    def _shuffle(self, expr: Any) -> Value:
        for vector in expr.vectors:
            self._value(vector)
        return None

    def _let(self, expr: Any) -> Value:
        self._variables[expr.var] = self._value(expr.value)
        return self._value(expr.body)

    def _load(self, expr: Any) -> Value:
        index = self._value(expr.indices[0])
        memory = self._memory[expr.source]
        if memory.scope == "global":
            return self._load_parameter(expr, memory, index)
        if memory.kind.name != "int" or index is None:
            return None
        if memory.scope.startswith("shared"):
            held = self._shared.get(expr.source)
            if held is None:
                return 0
            shape = self._lanes.shape
            at = np.broadcast_to(
                np.clip(np.asarray(index), 0, memory.elements - 1), shape
            )  # inactive threads may be out of range
            found = np.take_along_axis(np.broadcast_to(held, (*shape[:-1], held.shape[-1])), at, axis=-1)
            return np.maximum(found, 0)
        return self._locals.get((expr.source, index)) if isinstance(index, int) else None

    def _load_parameter(self, expr: Any, memory: TracedBuffer, index: Value) -> Value:
        at, size = np.asarray(0 if index is None else index), memory.kind.size
        ramp = expr.indices[0] if type(expr.indices[0]).__name__ == "Ramp" else None
        lanes = 1 if ramp is None else int(ramp.lanes)
        if ramp is not None and self._value(ramp.stride) != 1:
            stride = self._value(ramp.stride)
            for lane in range(lanes):
                apart = np.asarray(0 if stride is None else stride)
                self._note_load(memory.name, np.asarray(at + lane * apart, np.int64), size)
        else:
            self._note_load(memory.name, at // lanes, size * lanes)
        if memory.kind.name != "int":
            return None
        content = self._contents.get(memory.name)
        return 0 if content is None else content[np.minimum(at, len(content) - 1)]

    def _note_load(self, name: str, at: Array, size: int) -> None:
        share = self.trace.reads.setdefault(name, Reads()).add(self._lanes, at, size)
        if name in self._streamed:
            self._stretch.loads = self._stretch.loads + self._lanes.each()
            self._stretch.loaded = self._stretch.loaded + self._lanes.each(size * share)

    def _call(self, expr: Any) -> Value:
        name, args = _name(expr), list(expr.args)
        if name == "if_then_else":
            return self._either(expr, *args)
        values = [self._value(arg) for arg in args]
        if name in ("likely", "tvm_thread_invariant"):
            return values[0]
        known = all(value is not None for value in values)
        if name in _BINARY_CALLS and known:
            return _compute(_BINARY_CALLS[name], *values)
        if name not in _FREE:
            self._data(expr)
        return None

    def _either(self, expr: Any, condition: Any, then: Any, otherwise: Any) -> Value:
        truth = self._value(condition)
        if isinstance(truth, int | np.bool_ | bool):
            return self._value(then if truth else otherwise)
        with self._lanes.where(_mask(truth)):
            a = self._value(then)
        with self._lanes.where(_mask(_not(truth))):
            b = self._value(otherwise)
        if truth is None or a is None or b is None:
            self._data(expr)
            return None
        return np.where(truth, a, b)


def _filled(before: Array, turns: Array) -> Array:
    """Workgroup memory after a loop: for each element, the value from the last turn that changed it."""
    after = before
    for turn in turns:
        after = np.where(turn != before, turn, after)
    return after


def _compute(name: str, a: Any, b: Any) -> Value:
    value = _BINARY[name](a, b)
    return int(value) if np.ndim(value) == 0 else value


def _not(value: Value) -> Value:
    return None if value is None else (int(not value) if isinstance(value, int) else np.logical_not(value))


def _mask(value: Value) -> Mask:
    """The mask of a condition; a condition on data holds for all points."""
    return None if value is None else np.asarray(value, np.bool_)


def _name(expr: Any) -> str | None:
    """The name of the function that a call calls; None for other nodes."""
    if type(expr).__name__ != "Call":
        return None
    name = str(expr.op.name).split(".")[-1]
    return str(expr.args[0].value) if name in ("call_pure_extern", "call_extern") else name


def _extents(body: Any) -> dict[str, int]:
    """The extents of workgroups and threads; 1 for axes that are not used."""
    extents = dict.fromkeys((f"{kind}.{axis}" for kind in ("blockIdx", "threadIdx") for axis in "xyz"), 1)
    pending = [body]
    while pending:
        node = pending.pop()
        if type(node).__name__ == "AttrStmt":
            if str(node.attr_key) == "thread_extent":
                extents[str(node.node.thread_tag)] = int(node.value)
            pending.append(node.body)
        elif type(node).__name__ == "SeqStmt":
            pending += [child for child in node.seq if type(child).__name__ in ("AttrStmt", "SeqStmt")]
    return extents
