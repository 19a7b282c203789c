"""Turns the list of a model's step (nearfar.step.ops) into calls of MLX; it knows no particular model.

Two interfaces let it serve both the paged cache of the runtime (paged.py) and the function that is exported
to a file (nearfar.build.targets.mlx_function): where weights come from (reading.StepWeights), and how a step
handles rows and cache (calls.StepContext).
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from nearfar.edge_runtime.executors.mlx.calls import Made, StepContext, whole
from nearfar.edge_runtime.executors.mlx.elementwise import Elementwise
from nearfar.edge_runtime.executors.mlx.operations import OPERATIONS
from nearfar.edge_runtime.executors.mlx.reading import Product, StepReading, StepWeights
from nearfar.step.operation import Op, caches_of, reads
from nearfar.step.ops import Attend, Logits, RopeAppend
from nearfar.step.shapes import CacheShape


class Interpreter:
    """A list of operations, ready to run: weights are resolved, and choices of each operation
    are made once.
    """

    def __init__(
        self, ops: Sequence[Op], caches: Sequence[CacheShape], weights: StepWeights, arithmetic: Elementwise
    ) -> None:
        """`ops` must end with Logits or Embedding."""
        if [op.ends for op in ops].count(True) != 1 or not ops[-1].ends:
            raise ValueError("the list of a step must end with logits or an embedding, and have them once")
        turned = {op.out for op in ops if isinstance(op, RopeAppend)}
        if any(turned & set(reads(op)) for op in ops if not isinstance(op, Attend)):
            raise ValueError("what rope_append makes can be read by attend only")
        reading = StepReading(caches, weights, arithmetic)
        past = max((at for at, op in enumerate(ops, 1) if _keeps(op)), default=0)
        _add_all(reading, ops[:past])
        read = dict.fromkeys(name for op in ops[past:] for name in reads(op) if name in reading.values)
        self._live = [part.at for name in read for part in reading.values[name]]
        first = len(reading.calls.all)
        _add_all(reading, ops[past:])
        end = ops[-1]
        self._end = reading.whole(end.out).at
        self._walk, self._rest = reading.calls.all[:first], reading.calls.all[first:]
        self._softcap = end.softcap if isinstance(end, Logits) else None
        self._head: Product | None = None
        if isinstance(end, Logits):
            self._head, _ = reading.product(end.weight, end.bias)

    def step(self, run: StepContext) -> mx.array:
        """Run a step: returns the hidden states of the wanted rows [..., R, width], and appends
        to the cache.
        """
        made: Made = []
        for call in self._walk:
            made += call(made, run)
        if self._live:  # after the last cache only the wanted rows are needed
            for at, chosen in zip(self._live, run.choose([made[at] for at in self._live]), strict=True):
                made[at] = chosen
        for call in self._rest:
            made += call(made, run)
        return made[self._end]

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits, float32 [..., R, vocab], from the result of `step`; for an Embedding the result itself, in
        float32.
        """
        if self._head is None:
            return hidden.astype(mx.float32)
        out, softcap = whole(self._head(hidden)).astype(mx.float32), self._softcap
        return out if softcap is None else mx.tanh(out / softcap) * softcap


def _keeps(op: Op) -> bool:
    """Whether an operation changes a cache, so that it needs all rows of a step."""
    if isinstance(op, Attend):
        return False
    return op.append if isinstance(op, RopeAppend) else bool(caches_of(op))


def _add_all(reading: StepReading, ops: Sequence[Op]) -> None:
    for op in ops:
        reading.values[op.out] = OPERATIONS[type(op)](reading, op)
