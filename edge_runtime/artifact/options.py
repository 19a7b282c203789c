"""Options for loading an artifact: the keywords of Engine.load, and the defaults of the command line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict, cast, get_args

from nearfar.edge_runtime.artifact.budget import parse_size
from nearfar.edge_runtime.devices import parse_device
from nearfar.edge_runtime.progress import Ready
from nearfar.errors import RequestError
from nearfar.suggestions import suggested

VARIABLE = "NEARFAR_READY"


@dataclass(frozen=True)
class LoadOptions:
    """Options of `load`."""

    device: str = "auto"
    """A kind of device (`nearfar devices` lists them), "auto" for the best one, or one of several devices as
    "KIND:1" or "KIND:PART-OF-NAME".
    """
    kv_memory: float | str | None = None
    """Bytes for the KV cache, as a number or as "512MB"; the default is half of the free memory."""
    context: int | None = None
    """The most positions of a sequence: tokens of prompt and answer. The default is as many as the model and
    the memory allow. A model with LongRoPE uses its short factors if this is within its original context, and
    its long factors otherwise.
    """
    threads: int | None = None
    """CPU threads; the default is one for each core, within the container's quota."""
    verify: bool = True
    """Check the SHA-256 of every file before loading."""
    kv_bits: int | None = None
    """Bits of a value in the KV cache: a number that the device supports (mlx), or for which the artifact has
    programs. The default is the dtype in which the model computes.
    """
    precision: str | None = None
    """Use only programs that compute in "f16" or "f32"; the default is the best precision of the device."""
    program: str | None = None
    """Use only the program of this name (`nearfar inspect` lists the names)."""
    debug: bool = False
    """Check every call with the driver's validation layer; slow, and an error for devices without one."""
    trust: bool = False
    """Run the native code of an artifact that was not built here, now and later (docs/artifact.md)."""
    ready: Ready = field(default_factory=lambda: _ready(os.environ.get(VARIABLE) or "all"))
    """GPU kernels that are compiled and have run once before the load returns. "all": no answer waits for a
    compiler. "decode": no answer waits after its first token. "no": kernels are compiled when an answer needs
    them. The default is the environment's NEARFAR_READY, else "all".
    """

    def __post_init__(self) -> None:
        for name, (kind, words) in _KINDS.items():
            given = getattr(self, name)
            fits = isinstance(given, kind) and not (kind is int and isinstance(given, bool))
            if not fits and (given is not None or name not in _OPTIONAL):
                raise RequestError(f"{name} must be {words}, not {given!r:.80}", name)
        _ready(self.ready)
        parse_device(self.device)
        if self.kv_memory is not None:
            parse_size(self.kv_memory)
        for name in ("context", "threads"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise RequestError(f"{name} must be at least 1, not {given}", name)


_KINDS: dict[str, tuple[type, str]] = {
    "device": (str, "a kind of device (nearfar devices)"),
    "context": (int, "a whole number"),
    "threads": (int, "a whole number"),
    "verify": (bool, "true or false"),
    "kv_bits": (int, "a whole number"),
    "precision": (str, '"f16" or "f32"'),
    "program": (str, "the name of a program"),
    "debug": (bool, "true or false"),
    "trust": (bool, "true or false"),
}
_OPTIONAL = ("context", "threads", "kv_bits", "precision", "program")


def load_options(given: Mapping[str, Any]) -> LoadOptions:
    """Make LoadOptions of keywords; RequestError for an unknown option."""
    known = [one.name for one in fields(LoadOptions)]
    if unknown := next((name for name in given if name not in known), None):
        meant = suggested(unknown, known) or f"; there are {', '.join(known)}"
        raise RequestError(f"there is no option {unknown}{meant}", unknown)
    return LoadOptions(**given)


def _ready(given: str) -> Ready:
    for known in get_args(Ready):
        if given == known:
            return cast(Ready, known)
    raise RequestError(f"ready ({VARIABLE}) must be all, decode or no, not {given!r}", "ready")


class LoadKeywords(TypedDict, total=False):
    """The keywords of LoadOptions, typed for Engine.load."""

    device: str
    kv_memory: float | str | None
    context: int | None
    threads: int | None
    verify: bool
    kv_bits: int | None
    precision: str | None
    program: str | None
    debug: bool
    trust: bool
    ready: Ready
