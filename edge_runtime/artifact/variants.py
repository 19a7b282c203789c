"""Chooses which of an artifact's programs a GPU runs: the fastest of those made for its device class.

`line_up` is the same in web/src/worker/gpu/variants.ts: both replay tests/vectors/variants.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from nearfar.format.adapters import NEARNESS, DeviceClass

FINALISTS = 3
ROUNDS = 5
"""Timed decode steps of each program; the fastest one counts."""
BUDGET = 1.0
"""Seconds of timed steps in all, after which no further round begins."""
SLOW = 0.060
"""Seconds of a decode step above which trials would take too long."""
GAIN = 0.95
"""The share of the first program's time that another must not exceed to replace it."""
TOKENS = 64
"""Tokens decoded for each step of the largest size in the answer by which programs are compared."""

StepKind = Literal["decode", "large"]
Why = Literal["pinned", "only", "first", "software", "kept", "busy", "slow", "timed"]


class Candidate(Protocol):
    """The fields of a program that the choice depends on."""

    @property
    def name(self) -> str:
        """The name of the program."""
        ...

    @property
    def device_class(self) -> DeviceClass | None:
        """The device class that the program was made for."""
        ...


P = TypeVar("P", bound=Candidate)


@dataclass(frozen=True)
class ProgramChoice:
    """The program that runs, the reason for it, and the measured seconds of steps by program."""

    program: str
    why: Why
    seconds: Mapping[str, Mapping[StepKind, float]] = field(default_factory=dict)

    def __str__(self) -> str:
        measured = (
            f"{name} {' + '.join(f'{1000 * took:.2f} ms' for took in steps.values())}"
            for name, steps in self.seconds.items()
        )
        return f"{self.why}: {', '.join(measured)}" if self.seconds else self.why


def line_up(
    programs: Sequence[P], device_class: DeviceClass | None, lost: Collection[str] = ()
) -> tuple[P, ...]:
    """The finalists among the programs that a device can run; the first one runs if there is no trial.

    Programs of the device's own class come first, then those of the nearest class that has any. Programs that
    lost the device before are left out unless there are no others.
    """
    left = [program for program in programs if program.name not in lost] or list(programs)
    if device_class is None:
        return tuple(left[:1])
    near = NEARNESS[device_class]
    left.sort(key=lambda program: near.index(program.device_class or "software"))
    classes = list(dict.fromkeys(program.device_class for program in left))[:2]
    most = 1 if device_class == "software" else FINALISTS
    return tuple(program for program in left if program.device_class in classes)[:most]


def compare(names: Sequence[str], measure: Callable[[str, StepKind], float]) -> ProgramChoice:
    """Time whole steps of the programs in turn; the first stays unless another is clearly faster.

    `measure` runs one step of a program and returns its seconds. The first step of each kind compiles
    kernels, and is not counted.
    """
    best: dict[str, dict[StepKind, float]] = {name: {} for name in names}
    spent = _round(best, "decode", measure, counted=False) + _round(best, "decode", measure)
    if best[names[0]]["decode"] > SLOW:
        return ProgramChoice(names[0], "slow", best)
    best = {name: steps for name, steps in best.items() if steps["decode"] <= SLOW}
    for _ in range(ROUNDS - 1):
        spent += _round(best, "decode", measure) if spent < BUDGET else 0.0
    if spent < BUDGET:
        _round(best, "large", measure, counted=False)
        _round(best, "large", measure)
    costs = {name: TOKENS * steps["decode"] + steps.get("large", 0.0) for name, steps in best.items()}
    quickest = min(costs, key=lambda name: costs[name])
    return ProgramChoice(quickest if costs[quickest] <= GAIN * costs[names[0]] else names[0], "timed", best)


def _round(
    best: dict[str, dict[StepKind, float]],
    kind: StepKind,
    measure: Callable[[str, StepKind], float],
    *,
    counted: bool = True,
) -> float:
    """Run a step of each program in turn; return the seconds that count."""
    spent = 0.0
    for name, steps in best.items():
        took = measure(name, kind)
        if counted:
            steps[kind] = min(took, steps.get(kind, took))
            spent += took
    return spent
