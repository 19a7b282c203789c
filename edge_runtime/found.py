"""The features of a device, as its probe finds them and programs require them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nearfar.format.adapters import Adapter


@dataclass(frozen=True)
class Found:
    """The features of a device. `memory`: bytes that may be taken, None for the host's memory."""

    features: frozenset[str]
    limits: Mapping[str, int] = field(default_factory=dict)
    memory: int | None = None
    adapter: Adapter | None = None
    """The GPU's adapter; None for devices whose programs have no device classes."""
    arch: str | None = None
    system: str | None = None
    """The system whose native code it runs; with `arch` its platform. None for devices that run no native
    code.
    """
    advice: str = ""
    """Advice for users if the device can run no program of an artifact."""

    def largest_buffer(self) -> int | None:
        """Bytes of the largest buffer that kernels of the device can use; None if buffers have no limit of
        their own.
        """
        names = ("maxStorageBufferBindingSize", "maxBufferSize", "maxStorageBufferRange")
        return min((self.limits[name] for name in names if name in self.limits), default=None)
