"""Plans: linear sequences of kernel launches, read and checked against the manifest that lists them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from nearfar import strict_json
from nearfar.errors import ArtifactError
from nearfar.format.manifest import Function, Kernel, Manifest, Program


@dataclass(frozen=True)
class Launch:
    """One kernel launch of a plan; `grid` is empty on cpu."""

    kernel: str
    args: tuple[str, ...]
    grid: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A linear sequence of kernel launches."""

    function: str
    size: int
    rows: int
    launches: tuple[Launch, ...]


def parse_plan(text: str, name: str, bucket: Function, program: Program, manifest: Manifest) -> Plan:
    """Read the plan of one bucket of function `name`.

    ArtifactError if the text is not that plan, or names kernels or arguments that do not exist.
    """
    try:
        data = strict_json.loads(text)
    except ValueError as error:
        raise ArtifactError(f"{bucket.plan} is not valid JSON ({error}). Build the artifact again") from error
    stated = tuple(data.get(key) for key in ("function", "size", "rows")) if isinstance(data, dict) else data
    if stated != (name, bucket.size, bucket.rows):
        raise ArtifactError(
            f"{bucket.plan} is the plan of {str(stated)[:80]}, not of {name}, {bucket.size} rows in and "
            f"{bucket.rows} out. Build the artifact again"
        )
    launches = data.get("launches")
    if not isinstance(launches, list):
        raise ArtifactError(f"{bucket.plan} has no list of launches. Build the artifact again")
    known = _arguments(program, manifest)
    read = (
        _launch(launch, f"{bucket.plan}: launch {i}", program.kernels, known)
        for i, launch in enumerate(launches)
    )
    return Plan(name, bucket.size, bucket.rows, tuple(read))


def _arguments(program: Program, manifest: Manifest) -> set[str]:
    """Everything that an argument of a launch can name."""
    return {
        *(f"weight:{tensor.name}" for tensor in manifest.weights.tensors),
        *(f"buffer:{buffer.name}" for buffer in manifest.buffers),
        *(f"workspace:{index}" for index in range(len(program.workspace))),
    }


def _launch(data: Any, where: str, kernels: Mapping[str, Kernel], known: Collection[str]) -> Launch:
    record = data if isinstance(data, dict) else {}
    kernel, args, grid = record.get("kernel"), record.get("args"), record.get("grid", [])
    if not isinstance(kernel, str) or kernel not in kernels:
        raise ArtifactError(
            f"{where} names the kernel {str(kernel)[:80]!r}, which the manifest does not have"
        )
    taken = len(kernels[kernel].params or kernels[kernel].access)
    if not isinstance(args, list) or len(args) != taken:
        raise ArtifactError(f"{where}: {kernel} takes {taken} arguments, not {str(args)[:80]}")
    if unknown := [arg for arg in args if not isinstance(arg, str) or arg not in known]:
        raise ArtifactError(f"{where} names {str(unknown[0])[:80]!r}, which the manifest does not have")
    extents = (
        [extent for extent in grid if type(extent) is int and extent > 0] if isinstance(grid, list) else []
    )
    if grid != extents or len(extents) != (0 if kernels[kernel].params else 3):
        raise ArtifactError(f"{where}: the grid of {kernel} is {str(grid)[:80]}. Build the artifact again")
    return Launch(kernel, tuple(args), tuple(extents))
