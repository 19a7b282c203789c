"""Runs plans once before the first request: some drivers finish compiling a kernel only at its
first launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nearfar.edge_runtime.engine.device_thread import DeviceThread
from nearfar.edge_runtime.engine.steps import Run, StepWriter


def of_decode(runs: Sequence[Run]) -> list[Run]:
    """The runs of each token after the first, for one request. `runs` are sorted by size, smallest first."""
    smallest: dict[str, int] = {}
    for name, size in runs:
        smallest.setdefault(name, size)
    return [(name, size) for name, size in smallest.items() if name != "logprobs"]


async def run_each(
    runs: Sequence[Run], builder: StepWriter, device: DeviceThread, tell: Callable[[int, int], None]
) -> None:
    """Run each function over padding rows, which leaves no traces; `tell` gets the number done
    and the total.
    """
    for at, run in enumerate(runs):
        tell(at, len(runs))
        step, work = builder.idle(run)
        flying, _ = await device.turn(step, work, None)
        await device.turn(None, None, flying)
    tell(len(runs), len(runs))
