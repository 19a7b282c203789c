"""Describes how the weights of a quantized checkpoint were carried over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nearfar.format.manifest import CARRIED


def carried_lines(quantization: Mapping[str, Any], names: bool = False) -> list[str]:
    """A line for each kind of codes in the manifest's `quantization` that came from the checkpoint.

    With `names`, a line also names its matrices, where matrices differ. No lines for a checkpoint that was
    not quantized.
    """
    kinds: dict[str, list[dict[str, Any]]] = {}
    for matrix in quantization.get("matrices", []):
        if "carried" in matrix:
            kinds.setdefault(matrix["carried"], []).append(matrix)
    lines = []
    for kind in CARRIED:
        found = kinds.get(kind, [])
        step = max((matrix.get("step", 0.0) for matrix in found), default=0.0)
        bound = f" (≤ {step:.2g} of a step)" if step else ""
        which = ": " + ", ".join(matrix["name"] for matrix in found) if names and len(kinds) > 1 else ""
        if found:
            lines.append(f"{kind}{bound}: {len(found)} matrices{which}")
    return lines


def lines_by_target(quantizations: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines about the weights of a quantized checkpoint for the artifacts of one build, by target.

    A target that lacks a format rounds or requantizes what another one carries exactly. So the lines name the
    targets where these differ.
    """
    alike: dict[tuple[str, ...], list[str]] = {}
    for target, quantization in quantizations.items():
        alike.setdefault(tuple(carried_lines(quantization)), []).append(target)
    return [
        f"weights of the checkpoint{' for ' + ', '.join(targets) if len(alike) > 1 else ''}: {line}"
        for lines, targets in alike.items()
        for line in lines
    ]
