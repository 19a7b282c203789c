"""The schedule of TVM's own kernels on processors: one pass over the rows, no array between operations."""

from __future__ import annotations

from tvm import s_tir, target, tirx
from tvm.s_tir.dlight.analysis import normalize_prim_func
from tvm.s_tir.dlight.base import ScheduleRule, try_inline

from nearfar.kernels.contract import SHARED_FROM


class RowSchedule(ScheduleRule):
    """Computes each element at once, and lets threads share the rows where there are many.

    Without a schedule each operation of a fused kernel has an array of its own, as large as the step's rows:
    a kernel would ask for memory while it runs, and a WebAssembly module has little of it.
    """

    def apply(
        self, func: tirx.PrimFunc, target: target.Target, tunable: bool
    ) -> s_tir.Schedule | None:  # the names are TVM's
        """The schedule of `func`; None for a function that is not made of blocks."""
        schedule = s_tir.Schedule(func)
        blocks = normalize_prim_func(schedule)
        if blocks is None:
            return None
        for block in try_inline(schedule, blocks):
            rows = schedule.get_loops(block.block_rv)[0]
            if int(schedule.get(rows).extent) >= SHARED_FROM:
                schedule.parallel(rows)
        return schedule
