"""Writes a compiled program's kernels and plans as files of the artifact: the steps that all planned targets
share.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm

from nearfar.format import manifest
from nearfar.format.manifest import Buffer, Function
from nearfar.kernels.keep import Keep
from nearfar.kernels.program import LoweredPlan, LoweredProgram

Told = Callable[[int, int], None]


def _silent(done: int, total: int) -> None:
    """Ignore the progress."""


@dataclass(frozen=True)
class EmitContext:
    """The surroundings of an emitted program: the folder to write to, buffers by name, bytes of the largest
    tensor of the weights, whether figures are wanted, a callback for progress, and the cache for parts.
    """

    root: Path
    buffers: Mapping[str, Buffer]
    largest_weight: int
    figures: bool = False
    told: Told = _silent
    """Called with the number of compiled kernels and of all kernels of the program."""
    keep: Keep | None = None
    """Has parts of programs that earlier builds made; None: everything is compiled."""


Emit = Callable[[LoweredProgram, EmitContext], manifest.Program]
"""A function that writes the files of one target's program and returns the program's record in the
manifest.
"""


def module_of(program: LoweredProgram) -> tvm.IRModule:
    """The kernels as one module of public functions."""
    return tvm.IRModule(
        {name: func.with_attr("global_symbol", name) for name, func in program.kernels.items()}
    )


def plan_file(program: LoweredProgram, plan: LoweredPlan) -> str:
    """The path of a plan in the artifact."""
    return f"plans/{program.name}/{plan.function}.{plan.size}.json"


def write_plans(
    root: Path, program: LoweredProgram, launches: Mapping[str, list[dict[str, Any]]]
) -> dict[str, tuple[Function, ...]]:
    """Write each plan with its launches, and return the manifest's `functions`."""
    functions: dict[str, tuple[Function, ...]] = {}
    for plan in program.plans:
        file = plan_file(program, plan)
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"function": plan.function, "size": plan.size, "rows": plan.rows, "launches": launches[file]}
        path.write_text(json.dumps(record, indent=1) + "\n")
        entry = Function(plan.size, plan.rows, file, sha256_of(path))
        functions[plan.function] = (*functions.get(plan.function, ()), entry)
    return functions


def sha256_of(path: Path) -> str:
    """The SHA-256 of a small file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
