"""Values of a Hugging Face config.json, read by their types and within bounds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Never

from nearfar.errors import CheckpointError

LARGEST = 2**31 - 1  # of any size: offsets in kernels are 32 bits wide
MAX_LAYERS = 4096
MAX_CONTEXT = 1 << 24  # positions; a page table of it takes 64 MiB
EPSILON = (1e-12, 0.1)  # of a norm: float32 adds nothing below, and little else above
LAYER_TYPES = ("full_attention", "sliding_attention")


class ConfigReader:
    """Reads values by their types; a complaint names the file, the key, its value and what is allowed.

    A key that is absent or null takes the default; where there is none, it must be there. `within`: the key
    of the object that the values stand in, for messages.
    """

    def __init__(self, config: Mapping[str, Any], file: str = "config.json", within: str = "") -> None:
        self._config, self._file, self.within = config, file, within
        self._read: set[str] = set()
        self._values: dict[str, Any] = {}

    def given(self, key: str) -> bool:
        """Whether the key has a value."""
        self._read.add(key)
        return self._config.get(key) is not None

    def size(self, key: str, default: int | None = None, most: int = LARGEST, least: int = 1) -> int:
        """An integer from `least` to `most`."""
        value = self._get(key, default)
        if type(value) is not int or not least <= value <= most:
            self.refuse(key, f"an integer from {least} to {most:,}")
        return value

    def number(self, key: str, default: float | None, least: float, most: float) -> float:
        """A number from `least` to `most`."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not least <= value <= most:
            self.refuse(key, f"a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def choice(self, key: str, known: Sequence[str], default: str) -> str:
        """One of the known words."""
        value = self._get(key, default)
        if not isinstance(value, str) or value not in known:
            self.refuse(key, f"{' or '.join(known)}: nothing else is supported")
        return value

    def choices(self, key: str, known: Sequence[str], default: Sequence[str]) -> tuple[str, ...]:
        """As many of the known words as there are by default."""
        value = self._get(key, list(default))
        if (
            not isinstance(value, list)
            or len(value) != len(default)
            or not all(item in known for item in value)
        ):
            self.refuse(key, f"{len(default)} times {' or '.join(known)}")
        return tuple(value)

    def token_ids(self, key: str, vocab: int) -> tuple[int, ...]:
        """A token id, a list of them, or none; each below `vocab`."""
        value = self._get(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(type(token) is int and 0 <= token < vocab for token in ids):
            self.refuse(key, f"token ids from 0 to {vocab - 1:,} (vocab_size is {vocab:,})")
        return tuple(ids)

    def numbers(self, key: str, count: int, least: float, most: float) -> tuple[float, ...]:
        """A list of `count` numbers from `least` to `most`."""
        value = self._get(key, None)
        fits = isinstance(value, list) and len(value) == count
        if not fits or not all(type(item) in (int, float) and least <= item <= most for item in value):
            self.refuse(key, f"{count} numbers from {least:g} to {most:g}")
        return tuple(float(item) for item in value)

    def section(self, key: str) -> ConfigReader:
        """The object that a key holds. Who asks has to check all of its keys: `unread` does not."""
        self._read.add(key)
        value = self._config[key]
        if not isinstance(value, Mapping):
            self.refuse(key, "an object")
        return ConfigReader(value, self._file, f"{self.within}{key}.")

    def empty(self) -> ConfigReader:
        """A section without values, for what all of it has defaults."""
        return ConfigReader({}, self._file, self.within)

    def filled(self, defaults: Mapping[str, Any]) -> ConfigReader:
        """The config with `defaults` for the keys that it lacks; a key whose value is null stays null."""
        reader = ConfigReader({**defaults, **self._config}, self._file, self.within)
        reader._read, reader._values = self._read, self._values  # what is asked of one has been asked of both
        return reader

    @property
    def config(self) -> Mapping[str, Any]:
        """All that is there."""
        return self._config

    def names(self) -> list[str]:
        """The keys that are there."""
        return list(self._config)

    def values(self) -> dict[str, Any]:
        """What has been read, with the defaults that were taken, but for keys whose default is nothing."""
        return {key: value for key, value in self._values.items() if value not in (None, [])}

    def unread(self) -> dict[str, Any]:
        """What is there, but has never been asked for."""
        return {
            key: value for key, value in self._config.items() if key not in self._read and value is not None
        }

    def error(self, message: str) -> CheckpointError:
        """An error that names the file."""
        return CheckpointError(f"{self._file}: {message}")

    def refuse(self, key: str, expected: str) -> Never:
        """Complain about the value of a key."""
        raise CheckpointError(
            f"{self._file}: {self.within}{key} is {show(self._config.get(key))}; expected {expected}"
        )

    def _get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        value = self._config.get(key)
        self._values[key] = default if value is None else value
        return self._values[key]


def show(value: object) -> str:
    """A value as JSON writes it, cut short."""
    shown = json.dumps(value, default=repr)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
