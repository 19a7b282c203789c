"""Resolves names on the command line: to artifacts, a checkpoint, a model of the store, or of the hub."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path

from nearfar.build.adapters import short_name
from nearfar.build.options import QUALITY, Quality
from nearfar.edge_runtime.devices import device_names
from nearfar.errors import StoreError
from nearfar.hub import HUB_ID, no_path
from nearfar.paths import close_path
from nearfar.store.entries import FIRST, Store, WantedEntry
from nearfar.store.fetching import address_of, is_url, name_of
from nearfar.store.known import KNOWN
from nearfar.suggestions import suggested

CHECKPOINTS = ("config.json", "mlc-chat-config.json", "*.safetensors", "*.gguf")
"""Patterns of files that only checkpoints have, in the formats that a build reads."""


PART = re.compile(r"(.*)-\d{5}-of-(\d{5}(?:\.[^.]*)?)")
"""The name of a part of a split GGUF file."""


@dataclass(frozen=True)
class GivenOptions:
    """The build options that a user gave; None for an option means that any existing model will do."""

    quant: str | None = None
    quality: Quality | None = None
    requantize: str | None = None
    adapter: str | None = None

    @property
    def bits(self) -> tuple[str | None, str | None]:
        """The schemes of new codes: for matrices of floats, and for matrices that have codes."""
        return self.quant, self.requantize

    def suits(self, there: WantedEntry, given: str) -> bool:
        """Whether an existing entry, found by the name `given`, was built with these options. An entry with
        an adapter is meant only by its own name, or with that adapter.
        """
        bits = (None, None), (there.quant, there.requantize)
        same = self.adapter == there.adapter or (self.adapter is None and given == there.name)
        return self.bits in bits and self.quality in (None, there.quality) and same

    def called(self, name: str, gap: str) -> str:
        """The entry's name for these options: with scheme and quality after `gap`, where they are given."""
        said = [word for word in (*self.bits, self.quality) if word is not None and word != FIRST]
        name = f"{name}+{short_name(self.adapter)}" if self.adapter else name
        return f"{name}{gap}{'-'.join(said)}" if said else name

    def of(self, name: str, source: str) -> WantedEntry:
        """The entry to build from a source with these options."""
        adapter = self.adapter and str(Path(self.adapter).expanduser().resolve())
        there = adapter is not None and Path(adapter).exists()
        return WantedEntry(
            name,
            source,
            self.quant,
            self.quality or QUALITY,
            self.requantize,
            adapter if there else self.adapter,
        )


def wanted_of(given: str, store: Store, asked: GivenOptions = GivenOptions()) -> WantedEntry:
    """Resolve a name in this order: local path, stored model, short name, hub id. A URL is the address of an
    artifact. Raises StoreError otherwise.
    """
    if is_url(given):
        return _at(address_of(given), asked)
    path = Path(given).expanduser()
    source = str(path.resolve()) if path.exists() else None
    there = store.find(source or given)
    if asked.adapter is not None and (told := no_path(asked.adapter)) is not None:
        raise StoreError(told)
    if there is not None and asked.suits(there.wanted, given):
        return there.wanted
    if source is not None:
        return asked.of(asked.called(path.resolve().name, ":"), source)
    if given.lower() in KNOWN:
        known = KNOWN[given.lower()]
        bits = known.quant if asked.bits == (None, None) else asked.quant
        return replace(asked.of(asked.called(given.lower(), "-"), known.source), quant=bits)
    if (told := no_path(given)) is not None:
        raise StoreError(told)
    if HUB_ID.fullmatch(given):
        return asked.of(asked.called(given.rpartition("/")[2], ":"), given)
    # the entry has the same model with another quantization
    if there is not None and there.wanted.source != given:
        if asked.bits == (None, None):
            asked = replace(asked, quant=there.wanted.quant, requantize=there.wanted.requantize)
        return wanted_of(there.wanted.source, store, asked)
    raise StoreError(
        f"{given} is not a file or folder here, not in the store, and not a hub id{_meant(given, store)}"
    )


def _meant(given: str, store: Store) -> str:
    """Suggestions for an unknown name, as the end of a sentence."""
    names = [*(entry.wanted.name for entry in store.entries()), *KNOWN]
    family = [name for name in names if name.partition(":")[0].lower() == given.lower()]
    if len(family) > 1:  # the name stands for all sizes of the family
        return f": did you mean {', '.join(family[:-1])} or {family[-1]}?"
    if meant := suggested(given.lower(), names):
        return meant
    if path := close_path(given):
        return f": did you mean the path {path}?"
    return f" such as HuggingFaceTB/SmolLM2-135M-Instruct; short names are {', '.join(KNOWN)}"


def _at(address: str, asked: GivenOptions) -> WantedEntry:
    for option, value in vars(asked).items():
        if value is not None:
            raise StoreError(f"{address} is an artifact, quantized when it was built: leave --{option} out")
    return WantedEntry(name_of(address, device_names()), address)


def holds_checkpoint(folder: Path) -> bool:
    """Whether a folder looks like a checkpoint; opening it reports what is missing."""
    return any(any(folder.glob(pattern)) for pattern in CHECKPOINTS)


def mark_of(source: str, adapter: str | None = None) -> str | None:
    """A mark that changes with a local checkpoint, and with the adapter in it: names, sizes and times of
    their files. None where neither is a path.
    """
    marks = [_files_of(Path(given)) for given in (source, adapter) if given is not None]
    lines = [line for mark in marks if mark is not None for line in mark]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest() if lines else None


def _files_of(path: Path) -> list[str] | None:
    """A line for each file of a path; None for anything but a path."""
    if not path.exists():
        return None
    if path.is_dir():  # including the modules of embedding models
        files = sorted(file for file in (*path.iterdir(), *path.glob("*/config.json")) if file.is_file())
    else:  # including the other parts of a split GGUF file
        parts = PART.fullmatch(path.name)
        files = sorted(path.parent.glob(f"{escape(parts[1])}-*-of-{parts[2]}")) if parts else [path]
    stats = [(file.relative_to(path.parent).as_posix(), file.stat()) for file in files]
    return [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats]
