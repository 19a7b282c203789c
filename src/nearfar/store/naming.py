"""What a name on the command line means: artifacts, a checkpoint, a model of the store, or of the hub."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from nearfar.build.options import QUALITY, Quality
from nearfar.edge_runtime.devices import device_names
from nearfar.errors import StoreError
from nearfar.hub import HUB_ID
from nearfar.store.entries import Store, Wanted
from nearfar.store.fetching import address_of, is_url, name_of
from nearfar.store.known import KNOWN
from nearfar.suggestions import suggested

CHECKPOINTS = ("config.json", "mlc-chat-config.json", "*.safetensors", "*.gguf")
"""Files that only a checkpoint has, among those of formats that a build takes."""


def wanted_of(given: str, quant: str | None, store: Store, quality: Quality | None = None) -> Wanted:
    """What is to be built for a name: a path goes before a model of the store, that before a known name, that
    before a hub id. StoreError for what is none of them. What has a scheme is the address of artifacts.
    Without `quant` and `quality` what is there will do, however it was built.
    """
    said = [word for word in (quant, quality) if word is not None and word != QUALITY]
    better = quality or QUALITY
    if is_url(given):
        return _at(address_of(given), quant, quality)
    path = Path(given).expanduser()
    if path.exists():
        return Wanted(_called(path.resolve().name, ":", said), str(path.resolve()), quant, better)
    there = store.find(given)
    if there is not None and quant in (None, there.wanted.quant) and quality in (None, there.wanted.quality):
        return there.wanted
    if given.lower() in KNOWN:
        known = KNOWN[given.lower()]
        bits = known.quant if quant is None else quant
        return Wanted(_called(given.lower(), "-", said), known.source, bits, better)
    if HUB_ID.fullmatch(given):
        return Wanted(_called(given.rpartition("/")[2], ":", said), given, quant, better)
    if there is not None and there.wanted.source != given:  # the same model, otherwise quantized
        return wanted_of(there.wanted.source, quant or there.wanted.quant, store, quality)
    meant = suggested(given.lower(), (*(entry.wanted.name for entry in store.entries()), *KNOWN))
    raise StoreError(
        f"{given} is no path here, no model of the store (nearfar list), no hub id such as "
        "HuggingFaceTB/SmolLM2-135M-Instruct, and no known name"
        + (meant or f", of which there are {', '.join(KNOWN)}")
    )


def _at(address: str, quant: str | None, quality: Quality | None) -> Wanted:
    for option, value in (("--quant", quant), ("--quality", quality)):
        if value is not None:
            raise StoreError(f"{address} is an artifact, quantized when it was built: leave {option} out")
    return Wanted(name_of(address, device_names()), address)


def holds_checkpoint(folder: Path) -> bool:
    """Whether it looks like one; what it lacks is told by who opens it."""
    return any(any(folder.glob(pattern)) for pattern in CHECKPOINTS)


def mark_of(source: str) -> str | None:
    """What changes when somebody changes a checkpoint of this machine: names, sizes and times of its files.
    None for what is no path.
    """
    path = Path(source)
    if not path.exists():
        return None
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    stats = [(file.name, file.stat()) for file in files]
    lines = [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _called(name: str, gap: str, said: Sequence[str]) -> str:
    return f"{name}{gap}{'-'.join(said)}" if said else name
