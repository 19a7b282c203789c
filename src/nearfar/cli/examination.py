"""Finds out what of nearfar works on this machine, what is missing, and how to get it. It downloads nothing
and uses no network.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

import nearfar
from nearfar.version import __version__

State = Literal["ok", "missing", "wrong"]

USES = {
    "edge": "run, chat, web: artifacts on the processor and on GPUs through wgpu",
    "build": "build, pull, and names instead of artifacts",
    "vulkan": "artifacts of target vulkan",
    "mlx": "artifacts of target mlx",
    "onnx": "target onnx: building and running",
    "grammars": "response_format on the device",
    "front": "serve: artifacts, and servers behind this one",
    "server": "serve: checkpoints in torch, for what no device can carry",
    "ray": "serve --ray: replicas",
    "limits": "serve --limits-store: limits of several servers together",
    "tracing": "serve: traces by OpenTelemetry",
    "routing": "the routing SDK, whose client decides between device and cloud",
}
"""Extras that users may want, and their purpose; extras for developers of nearfar are left out."""
ROOM = 5 << 30
"""Bytes that should be free on the disk: for a model of 4 billion weights, and a checkpoint in the hub's
cache.
"""


@dataclass(frozen=True)
class Finding:
    """One finding: `name` is the thing examined, `told` the result, `how` the advice unless the state is
    "ok".

    The state "missing": only some uses need it; "wrong": it does not work as intended.
    """

    part: str
    name: str
    state: State
    told: str
    how: str | None = None


def examine() -> Iterator[Finding]:
    """Yield all findings, the most important parts first."""
    yield from _python()
    yield from _extras()
    yield from _devices()
    yield from _page()
    yield from _store()
    yield from _settings()


def able(findings: list[Finding]) -> bool:
    """Whether some kind of artifact can be run here; the store does not matter."""
    return any(finding.part == "devices" and finding.state == "ok" for finding in findings)


def keeps(findings: list[Finding]) -> bool:
    """Whether models can be kept in the store."""
    return not any(finding.part == "store" and finding.state == "wrong" for finding in findings)


def _python() -> Iterator[Finding]:
    told = f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}"
    yield Finding("python", "python", "ok", told)
    yield Finding("python", "nearfar", "ok", f"{__version__} at {Path(nearfar.__file__).resolve().parent}")


def _extras() -> Iterator[Finding]:
    for extra, use in USES.items():
        lacks = [told for told in map(_lack, requirements(extra)) if told]
        if not lacks:
            yield Finding("extras", extra, "ok", use)
            continue
        yield Finding(
            "extras", extra, "missing", f"{use}; lacks {', '.join(lacks)}", f"pip install 'nearfar[{extra}]'"
        )


def requirements(extra: str) -> list[Requirement]:
    """The requirements of an extra on this machine, including those of extras that it names."""
    found: dict[str, Requirement] = {}
    waiting, seen = [extra], {extra}
    every = [Requirement(line) for line in metadata.requires("nearfar") or ()]
    while waiting:
        wanted = waiting.pop()
        for requirement in every:
            marker = requirement.marker
            if marker is None or marker.evaluate({"extra": ""}) or not marker.evaluate({"extra": wanted}):
                continue
            if requirement.name == "nearfar":
                more = requirement.extras - seen
                seen |= more
                waiting += sorted(more)
            else:
                found.setdefault(str(requirement), requirement)
    return [*found.values()]


def _lack(requirement: Requirement) -> str | None:
    """The name of a requirement with the wanted and installed versions if it is not fulfilled, else None."""
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return requirement.name
    if requirement.specifier.contains(version, prereleases=True):
        return None
    return f"{requirement.name} {requirement.specifier} (here is {version})"


def _devices() -> Iterator[Finding]:
    from nearfar.edge_runtime.devices import device, device_names
    from nearfar.errors import DeviceError

    for target in device_names():
        try:
            listed = device(target).list()
        except (DeviceError, ImportError) as error:
            yield Finding(
                "devices", target, "missing", "artifacts of this target do not run here", str(error)
            )
            continue
        names = "; ".join(f"{one.name} ({one.kind})" for one in listed)
        yield Finding("devices", target, "ok", names)


def _page() -> Iterator[Finding]:
    from nearfar.cli.page_server import find_page
    from nearfar.errors import NearfarError

    try:
        yield Finding("page", "chat page", "ok", str(find_page()))
    except NearfarError as error:
        yield Finding("page", "chat page", "missing", "`nearfar web` has no page", str(error))


def _store() -> Iterator[Finding]:
    from nearfar.errors import NearfarError

    try:
        from nearfar.edge_runtime.artifact.budget import show_size
        from nearfar.store.entries import Store
    except ModuleNotFoundError as error:
        told = f"models cannot be kept under their names without {error.name}"
        yield Finding("store", "store", "missing", told, "pip install 'nearfar[build,edge]'")
        return
    how = "set NEARFAR_HOME to a folder that you may write to"
    try:
        store = Store()
    except NearfarError as error:
        yield Finding("store", "store", "wrong", f"the store cannot be written to: {error}", how)
        return
    there = store.root
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        yield Finding("store", "store", "wrong", f"{store.root} cannot be written to: {error.strerror}", how)
        return
    free = shutil.disk_usage(there).free
    told = f"{store.root}, {len(store.entries())} models, {show_size(free)} free"
    if free < ROOM:
        how = "free some space, or set NEARFAR_HOME and HF_HOME to folders on another disk"
        yield Finding("store", "store", "missing", f"{told}: little for models", how)
        return
    yield Finding("store", "store", "ok", told)


def _settings(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Yield findings about nearfar's environment variables; one that nothing reads is a misspelling."""
    known = known_settings()
    for name in sorted(name for name in environment if name.startswith("NEARFAR_")):
        if name in known:
            yield Finding("settings", name, "ok", "set" if name.endswith("_KEY") else environment[name])
        else:
            how = f"unset it; nearfar reads {', '.join(sorted(known))}"
            yield Finding("settings", name, "wrong", "nothing reads this variable", how)


def known_settings() -> set[str]:
    """The environment variables that nearfar's source files read."""
    root = Path(nearfar.__file__).resolve().parent
    # some folders are links
    folders = [root, *(folder.resolve() for folder in root.iterdir() if folder.is_dir())]
    texts = (file.read_text(encoding="utf-8") for folder in folders for file in folder.rglob("*.py"))
    return {name for text in texts for name in re.findall(r'"(NEARFAR_[A-Z0-9_]+)"', text)}
