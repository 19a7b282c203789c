"""What was made lately is kept, up to so many bytes."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Generic, TypeVar

from nearfar.edge_runtime.grammars.grammar import Grammar

K = TypeVar("K")
V = TypeVar("V")


def key_of(grammar: Grammar) -> str:
    """A name for a grammar that is short and is no other's."""
    return hashlib.sha256(f"{grammar.kind}\n{grammar.text}".encode(errors="surrogatepass")).hexdigest()


class Kept(Generic[K, V]):
    """Values with their sizes in bytes; beyond `most` bytes those not asked for longest go. The newest
    always stays.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.bytes = 0
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def has(self, key: K) -> bool:
        """Whether it is kept; then it counts as used now."""
        if key in self._values:
            self._values.move_to_end(key)
        return key in self._values

    def get(self, key: K) -> V | None:
        """The value, if it is kept; it counts as used now."""
        return self._values[key][0] if self.has(key) else None

    def put(self, key: K, value: V, size: int) -> list[K]:
        """Keep a value of `size` bytes; gives the keys of those that had to go."""
        self.drop(key)
        self._values[key] = value, size
        self.bytes += size
        gone = []
        while len(self._values) > 1 and self.bytes > self.most:
            gone.append(next(iter(self._values)))
            self.drop(gone[-1])
        return gone

    def drop(self, key: K) -> None:
        """Keep it no longer."""
        _, size = self._values.pop(key, (None, 0))
        self.bytes -= size

    def clear(self) -> None:
        """Keep nothing."""
        self._values.clear()
        self.bytes = 0
