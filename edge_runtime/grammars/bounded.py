"""A cache of values with a limit in bytes; the least recently used values are dropped."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Generic, TypeVar

from nearfar.edge_runtime.grammars.grammar import Grammar

K = TypeVar("K")
V = TypeVar("V")


def key_of(grammar: Grammar) -> str:
    """A short key that identifies a grammar: the SHA-256 of its kind and text."""
    return hashlib.sha256(f"{grammar.kind}\n{grammar.text}".encode(errors="surrogatepass")).hexdigest()


class BoundedCache(Generic[K, V]):
    """A cache of values with their sizes; beyond `most` bytes the least recently used are dropped, never the
    newest.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.bytes = 0
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def has(self, key: K) -> bool:
        """Whether a value is cached; if it is, it counts as used now."""
        if key in self._values:
            self._values.move_to_end(key)
        return key in self._values

    def get(self, key: K) -> V | None:
        """The value, or None; a cached value counts as used now."""
        return self._values[key][0] if self.has(key) else None

    def put(self, key: K, value: V, size: int) -> list[K]:
        """Cache a value of `size` bytes; return the keys of dropped values."""
        self.drop(key)
        self._values[key] = value, size
        self.bytes += size
        gone = []
        while len(self._values) > 1 and self.bytes > self.most:
            gone.append(next(iter(self._values)))
            self.drop(gone[-1])
        return gone

    def drop(self, key: K) -> None:
        """Remove a value, if it is cached."""
        _, size = self._values.pop(key, (None, 0))
        self.bytes -= size

    def clear(self) -> None:
        """Remove all values."""
        self._values.clear()
        self.bytes = 0
