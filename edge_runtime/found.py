"""What a device offers, as its probe finds it and an artifact's programs need it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nearfar.format.adapters import Adapter


@dataclass(frozen=True)
class Found:
    """What a device offers. `memory`: bytes that may be taken, where it is not simply the host's."""

    features: frozenset[str]
    limits: Mapping[str, int] = field(default_factory=dict)
    memory: int | None = None
    adapter: Adapter | None = None
    """What kind of GPU it is; None on devices without programs for classes of them."""
    arch: str | None = None
    system: str | None = None
    """Whose native code it runs: an architecture and an operating system; None on devices that run none."""
    advice: str = ""
    """What to do where it can run no program of an artifact."""

    def largest_buffer(self) -> int | None:
        """Bytes of the largest buffer that kernels of the device reach.

        None where buffers have no limit of their own.
        """
        names = ("maxStorageBufferBindingSize", "maxBufferSize", "maxStorageBufferRange")
        return min((self.limits[name] for name in names if name in self.limits), default=None)
