"""Kinds of devices that artifacts run on from Python: one folder each in executors/, with `DEVICE`.

A device is called like the target whose artifacts it runs; nothing else names it.
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
"""What --device takes for the best one."""
ELSEWHERE = {
    **dict.fromkeys(("cuda", "nvidia"), "an NVIDIA card is vulkan or webgpu"),
    **dict.fromkeys(("rocm", "hip", "amd"), "an AMD card is vulkan or webgpu"),
    **dict.fromkeys(("xpu", "sycl", "intel"), "an Intel GPU is vulkan or webgpu"),
    **dict.fromkeys(("metal", "mps"), "a Mac's GPU is mlx or webgpu"),
    "gpu": "a GPU is vulkan, webgpu or on a Mac mlx",
}
"""What other programs call devices, and what to take instead."""


@dataclass(frozen=True)
class Settings:
    """What an executor is opened with: pages by group, positions, CPU threads, bits that the device quantizes
    its cache to.

    `which`: the device of its kind, by number or name; `debug`: checked by the driver's validation layer;
    `timed`: what each launch takes will be asked for.
    """

    pages: tuple[int, ...]
    context: int
    threads: int | None = None
    kv_bits: int | None = None
    which: str | None = None
    debug: bool = False
    timed: bool = False


@dataclass(frozen=True)
class Listed:
    """A device as `nearfar devices` shows it. `id`: what --device takes.

    `memory`: bytes in all, 0 where that is not known. `device_class`: whose programs it takes, on GPUs.
    """

    id: str
    name: str
    kind: str
    driver: str
    features: tuple[str, ...]
    memory: int
    limits: Mapping[str, int]
    device_class: str | None = None


class Probe(Protocol):
    """Finds out what a device offers; DeviceError where there is none. `which`: see Settings."""

    def __call__(self, which: str | None = None) -> Found:
        """Ask the driver."""
        ...


@dataclass(frozen=True)
class Device:
    """One kind of device. Making the record imports nothing; its functions import what they need."""

    probe: Probe
    open: Callable[[Artifact, Program, Settings], Executor]
    preferred: Callable[[], int]
    """How much to take it before others, where artifacts for several are at hand.

    The CPU is 0; what is below is a last resort.
    """
    list: Callable[[], Sequence[Listed]]
    beside: Callable[[Executor, Artifact, Program, Settings], Executor] | None = None
    """Opens an executor of another program over the weights of one that is open, which is closed after it."""
    pipelined: bool = True
    """Whether it computes behind the host, so that a step is queued before the one before has been read."""
    several: bool = False
    """Whether there can be more than one, told apart by `which`."""
    native: bool = False
    """Whether its artifacts are native code, which runs in this process."""
    debug: bool = False
    """Whether its driver has a validation layer."""
    kv_bits: tuple[int, ...] = ()
    """How it can quantize the cache of any program; others have programs for that (Program.kv_dtype)."""


@cache
def device_names() -> tuple[str, ...]:
    """The kinds of devices that there are folders for."""
    return tuple(sorted(module.name for module in iter_modules(executors.__path__) if module.ispkg))


def device(name: str) -> Device:
    """The device of a folder, imported when it is asked for; KeyError where there is none."""
    if name not in device_names():
        raise KeyError(name)
    return cast(Device, import_module(f"{executors.__name__}.{name}").DEVICE)


def parse_device(given: str) -> tuple[str, str | None]:
    """What --device means: "auto" or a kind, and which of its devices ("KIND:1", "KIND:radeon").

    RequestError for others.
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
    """What --device takes, in words."""
    several = "; ".join(f"{kind}:1 or {kind}:PART-OF-NAME" for kind in _several())
    return f"{', '.join(device_names())} or {AUTO}; {several} for one of several (nearfar devices)"


def kv_bits_choices() -> str:
    """How caches can be quantized, in words."""
    able = {name: device(name).kv_bits for name in device_names()}
    own = ", ".join(f"{name} ({' or '.join(map(str, bits))})" for name, bits in able.items() if bits)
    return f"{own}; elsewhere what the artifact has programs for (nearfar build --kv-bits)"


def debug_choices() -> str:
    """Which devices' drivers have a validation layer."""
    return ", ".join(name for name in device_names() if device(name).debug)


def _several() -> tuple[str, ...]:
    return tuple(name for name in device_names() if device(name).several)
