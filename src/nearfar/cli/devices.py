"""`nearfar devices`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from nearfar.edge_runtime.artifact.budget import show_size
from nearfar.edge_runtime.devices import ListedDevice, device, device_names
from nearfar.errors import DeviceError

AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON: for each target its devices, or why there is none.")
]
Limits = Annotated[bool, typer.Option("--limits", help="Show the limits of each device, too.")]


def devices(as_json: AsJson = False, limits: Limits = False) -> None:
    """List the devices of this machine on which artifacts of each target would run, the default device
    first.
    """
    found = {target: _list(target) for target in device_names()}
    if as_json:
        json.dump({target: _record(entry) for target, entry in found.items()}, sys.stdout, indent=2)
        print()
        return
    for target, entry in found.items():
        if isinstance(entry, str):
            print(f"{target}\n    not here: {entry}")
            continue
        for listed in entry:
            print(listed.id)
            for line in _describe(listed, limits):
                print(f"    {line}")


def _list(target: str) -> Sequence[ListedDevice] | str:
    """The devices of a target, or why there is none."""
    try:
        return device(target).list()
    except (DeviceError, ImportError) as error:
        return str(error)


def _record(entry: Sequence[ListedDevice] | str) -> dict[str, Any]:
    if isinstance(entry, str):
        return {"devices": [], "reason": entry}
    return {"devices": [dataclasses.asdict(listed) for listed in entry]}


def _describe(listed: ListedDevice, limits: bool) -> list[str]:
    memory = f", {show_size(listed.memory)}" if listed.memory else ""
    lines = [f"{listed.name} ({listed.kind}{memory})", f"driver: {listed.driver}"]
    if listed.device_class:
        lines.append(f"class: {listed.device_class}")
    lines.append(f"features: {', '.join(listed.features) or 'none'}")
    if limits:
        lines += [f"{name}: {value:,}" for name, value in sorted(listed.limits.items())]
    return lines
