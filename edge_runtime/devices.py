"""Kinds of devices that artifacts run on from Python: each has a folder in executors/ with a
record `DEVICE`.

A device has the name of the target whose artifacts it runs; no other place names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Protocol, cast

from nearfar.edge_runtime import executors
from nearfar.edge_runtime.found import Found
from nearfar.errors import RequestError

if TYPE_CHECKING:
    from nearfar.edge_runtime.artifact.reader import Artifact
    from nearfar.edge_runtime.executors.base import Executor
    from nearfar.format.manifest import Program

AUTO = "auto"
"""The value of --device that means the best one."""
ELSEWHERE = {
    **dict.fromkeys(("cuda", "nvidia"), "an NVIDIA card is vulkan or webgpu"),
    **dict.fromkeys(("rocm", "hip", "amd"), "an AMD card is vulkan or webgpu"),
    **dict.fromkeys(("xpu", "sycl", "intel"), "an Intel GPU is vulkan or webgpu"),
    **dict.fromkeys(("metal", "mps"), "a Mac's GPU is mlx or webgpu"),
    "gpu": "a GPU is vulkan, webgpu or on a Mac mlx",
}
"""Names that other programs have for devices, and what to use instead."""


@dataclass(frozen=True)
class Settings:
    """Settings of an executor: pages by group, positions, CPU threads, bits that the device quantizes its
    cache to.

    `which`: the device of its kind, by number or name. `debug`: the driver's validation layer checks calls.
    `timed`: the time of each launch will be requested.
    """

    pages: tuple[int, ...]
    context: int
    threads: int | None = None
    kv_bits: int | None = None
    which: str | None = None
    debug: bool = False
    timed: bool = False


@dataclass(frozen=True)
class ListedDevice:
    """A device as `nearfar devices` shows it.

    `id`: the value for --device. `memory`: bytes in all, 0 if unknown. `device_class`: of a GPU, the class of
    programs that it runs.
    """

    id: str
    name: str
    kind: str
    driver: str
    features: tuple[str, ...]
    memory: int
    limits: Mapping[str, int]
    device_class: str | None = None


class DeviceProbe(Protocol):
    """Finds out what a device offers; DeviceError if there is none. `which`: see Settings."""

    def __call__(self, which: str | None = None) -> Found:
        """Query the driver."""
        ...


@dataclass(frozen=True)
class Device:
    """One kind of device. Making the record imports nothing; its functions import what they need."""

    probe: DeviceProbe
    open: Callable[[Artifact, Program, Settings], Executor]
    preferred: Callable[[], int]
    """Preference over other devices if there are artifacts for several. The CPU is 0; a negative number is a
    last resort.
    """
    list: Callable[[], Sequence[ListedDevice]]
    beside: Callable[[Executor, Artifact, Program, Settings], Executor] | None = None
    """Opens an executor of another program that uses the weights of an open one, and is closed before it."""
    pipelined: bool = True
    """Whether the device computes while the host goes on, so that a step is queued before the last one is
    read.
    """
    several: bool = False
    """Whether there can be several devices of this kind, told apart by `which`."""
    native: bool = False
    """Whether its artifacts are native code that runs in this process."""
    debug: bool = False
    """Whether its driver has a validation layer."""
    kv_bits: tuple[int, ...] = ()
    """Bits to which it can quantize the cache of any program; other devices need programs for it
    (Program.kv_dtype).
    """


@cache
def device_names() -> tuple[str, ...]:
    """The kinds of devices: the names of the folders in executors/."""
    return tuple(sorted(module.name for module in iter_modules(executors.__path__) if module.ispkg))


def device(name: str) -> Device:
    """The device of a folder, imported on request; KeyError if there is none."""
    if name not in device_names():
        raise KeyError(name)
    return cast(Device, import_module(f"{executors.__name__}.{name}").DEVICE)


def parse_device(given: str) -> tuple[str, str | None]:
    """Parse --device into a kind (or "auto") and one of its devices: "KIND:1", "KIND:radeon". RequestError
    for others.
    """
    kind, colon, which = given.partition(":")
    if kind not in (AUTO, *device_names()):
        through = ELSEWHERE.get(kind.lower())
        raise RequestError(
            f"device must be {AUTO}, {' or '.join(device_names())}, not {given!r}"
            + (f": {through} here" if through else ""),
            "device",
        )
    if colon and (kind == AUTO or not device(kind).several):
        able = ", ".join(_several())
        raise RequestError(f"only {able} can name one of several devices, not {given!r}", "device")
    if colon and not which:
        raise RequestError(
            f"{given!r} names no device after the colon: {kind}:0, or a part of a name", "device"
        )
    return kind, which or None


def device_choices() -> str:
    """Describe the values that --device takes."""
    several = "; ".join(f"{kind}:1 or {kind}:PART-OF-NAME" for kind in _several())
    return f"{', '.join(device_names())} or {AUTO}; {several} for one of several (nearfar devices)"


def kv_bits_choices() -> str:
    """Describe how caches can be quantized, by device."""
    able = {name: device(name).kv_bits for name in device_names()}
    own = ", ".join(f"{name} ({' or '.join(map(str, bits))})" for name, bits in able.items() if bits)
    return f"{own}; elsewhere what the artifact has programs for (nearfar build --kv-bits)"


def debug_choices() -> str:
    """List the devices whose drivers have a validation layer."""
    return ", ".join(name for name in device_names() if device(name).debug)


def _several() -> tuple[str, ...]:
    return tuple(name for name in device_names() if device(name).several)
