"""Values of a Hugging Face config.json, read by their types and within bounds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Never

from nearfar.errors import CheckpointError

LARGEST = 2**31 - 1  # the largest size: offsets in kernels are 32 bits wide
MAX_LAYERS = 4096
MAX_CONTEXT = 1 << 24  # positions; a page table for this many positions takes 64 MiB
EPSILON = (1e-12, 0.1)  # a norm's epsilon: smaller ones vanish in float32, larger ones outweigh the values
LAYER_TYPES = ("full_attention", "sliding_attention")


class ConfigReader:
    """Reads values by their types; an error names the file, the key, its value and what is allowed.

    A key that is absent or null takes the default; a key without a default is required. `within`: the path of
    the object that holds the values, for messages.
    """

    def __init__(self, config: Mapping[str, Any], file: str = "config.json", within: str = "") -> None:
        self._config, self._file, self.within = config, file, within
        self._read: set[str] = set()
        self._values: dict[str, Any] = {}

    def given(self, key: str) -> bool:
        """Whether `key` has a value other than null; the key counts as read."""
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
        """A list of known words, as long as `default`."""
        value = self._get(key, list(default))
        if (
            not isinstance(value, list)
            or len(value) != len(default)
            or not all(item in known for item in value)
        ):
            self.refuse(key, f"{len(default)} times {' or '.join(known)}")
        return tuple(value)

    def token_ids(self, key: str, vocab: int) -> tuple[int, ...]:
        """The token ids of a key that holds one id, a list of ids or nothing; each must be below `vocab`."""
        value = self._get(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(type(token) is int and 0 <= token < vocab for token in ids):
            self.refuse(key, f"token ids from 0 to {vocab - 1:,} (vocab_size is {vocab:,})")
        return tuple(ids)

    def indices(self, key: str, count: int) -> tuple[int, ...]:
        """A list of numbers below `count`, which may be absent."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item < count for item in value):
            self.refuse(key, f"a list of numbers from 0 to {count - 1}")
        return tuple(value)

    def numbers(self, key: str, count: int, least: float, most: float) -> tuple[float, ...]:
        """A list of `count` numbers from `least` to `most`."""
        value = self._get(key, None)
        fits = isinstance(value, list) and len(value) == count
        if not fits or not all(type(item) in (int, float) and least <= item <= most for item in value):
            self.refuse(key, f"{count} numbers from {least:g} to {most:g}")
        return tuple(float(item) for item in value)

    def section(self, key: str) -> ConfigReader:
        """A reader of the object that a key holds. The caller must check all of its keys: `unread` does not
        look into it.
        """
        self._read.add(key)
        value = self._config[key]
        if not isinstance(value, Mapping):
            self.refuse(key, "an object")
        return ConfigReader(value, self._file, f"{self.within}{key}.")

    def empty(self) -> ConfigReader:
        """A reader of a section without values, so that every key takes its default."""
        return ConfigReader({}, self._file, self.within)

    def filled(self, defaults: Mapping[str, Any]) -> ConfigReader:
        """The config with `defaults` for the keys that it lacks; a key whose value is null stays null."""
        reader = ConfigReader({**defaults, **self._config}, self._file, self.within)
        reader._read, reader._values = self._read, self._values  # both readers count the same keys as read
        return reader

    @property
    def config(self) -> Mapping[str, Any]:
        """The config as a mapping, unread keys included."""
        return self._config

    def names(self) -> list[str]:
        """The keys of the config."""
        return list(self._config)

    def values(self) -> dict[str, Any]:
        """The values that have been read, defaults included, except keys whose value is None or an empty
        list.
        """
        return {key: value for key, value in self._values.items() if value not in (None, [])}

    def unread(self) -> dict[str, Any]:
        """The keys and values that nothing has read; null values are left out."""
        return {
            key: value for key, value in self._config.items() if key not in self._read and value is not None
        }

    def error(self, message: str) -> CheckpointError:
        """A CheckpointError whose message begins with the file's name."""
        return CheckpointError(f"{self._file}: {message}")

    def refuse(self, key: str, expected: str) -> Never:
        """Raise a CheckpointError that names a key, its value and the expected one."""
        raise CheckpointError(
            f"{self._file}: {self.within}{key} is {show(self._config.get(key))}; expected {expected}"
        )

    def _get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        value = self._config.get(key)
        self._values[key] = default if value is None else value
        return self._values[key]


def show(value: object) -> str:
    """A value as JSON, cut to 80 characters."""
    shown = json.dumps(value, default=repr)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
