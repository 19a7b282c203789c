"""How an artifact is to be loaded: keywords of Engine.load. The command line takes its defaults from here."""

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
    """What `load` is asked for besides the artifact."""

    device: str = "auto"
    """A kind of device (`nearfar devices` lists them) or "auto";

    "KIND:1" or "KIND:PART-OF-NAME" for one of several.
    """
    kv_memory: float | str | None = None
    """Bytes for the KV cache, such as "512MB"; default half of what is free."""
    context: int | None = None
    """No more positions than these: tokens of prompt and answer. Default: as many as the model and the memory
    allow. A model with LongRoPE computes with its short factors where this is no more than its original
    context, and with the long ones otherwise.
    """
    threads: int | None = None
    """CPU threads; default one a core, within the quota of the container."""
    verify: bool = True
    """Check the SHA-256 of every file first."""
    kv_bits: int | None = None
    """Keep the KV cache in so many bits a value: as the device can (mlx), or the artifact has programs for;

    default as the model computes.
    """
    precision: str | None = None
    """Only programs that compute in "f16" or "f32"; default the best that the device has."""
    program: str | None = None
    """Only the program of this name (`nearfar inspect` lists them)."""
    debug: bool = False
    """Check every call with the driver's validation layer, where it has one; slow."""
    trust: bool = False
    """Run the native code of an artifact that was not built here, now and later (docs/artifact.md)."""
    ready: Ready = field(default_factory=lambda: _ready(os.environ.get(VARIABLE) or "all"))
    """Which kernels of a GPU are compiled and have run once when the load is done: "all", so that no answer
    waits for a compiler; "decode", so that none waits after its first token; "no": what an answer asks for
    is compiled while it waits. Default: the environment's NEARFAR_READY, else "all".
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
    """Options as keywords; RequestError for a name that there is not."""
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
    """LoadOptions as keywords, for type checkers: those of Engine.load."""

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
