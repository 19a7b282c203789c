"""Remembers which server or replica has seen the beginning of a prompt, since its cache may have it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Generic, TypeVar

import numpy as np

TOKENS = 16
"""Tokens that are hashed together, as many as the pages of the engines' caches hold. Shorter prompts have no
affinity.
"""
CHARACTERS = 256
"""Characters that are hashed together for a prompt that is known as text."""
BLOCKS = 256
"""Most blocks of a prompt that are hashed. A longer common beginning changes nothing, and one long prompt
must not push all others out.
"""
REMEMBERED = 65536
"""Blocks whose owner is remembered; the least recently used are forgotten first."""
Owner = TypeVar("Owner", bound=Hashable)


class PrefixMap(Generic[Owner]):
    """Maps blocks of prompts, as `token_blocks` and `text_blocks` make them, to the owner that computed them
    last.
    """

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._owners: OrderedDict[bytes, Owner] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owners)

    def clear(self) -> None:
        """Forget all."""
        self._owners.clear()

    def known(self, blocks: Sequence[bytes]) -> list[Owner]:
        """Return the owners that know a beginning of the prompt, the longest beginning first."""
        found = (self._owners[block] for block in reversed(blocks) if block in self._owners)
        return list(dict.fromkeys(found))

    def remember(self, blocks: Sequence[bytes], owner: Owner) -> None:
        """Record that the owner computes a prompt with these blocks now."""
        for block in blocks:
            self._owners[block] = owner
            self._owners.move_to_end(block)
        while len(self._owners) > self._remembered:
            self._owners.popitem(last=False)


def token_blocks(tokens: Sequence[int], salt: str = "") -> list[bytes]:
    """Return one hash per whole block, over everything up to the block's end. Two salts have no block in
    common, as in the caches.
    """
    parts = (np.asarray(tokens[at : at + TOKENS], "<i8").tobytes() for at in _starts(len(tokens), TOKENS))
    return _hashes(len(salt).to_bytes(8, "little") + salt.encode(), parts)


def text_blocks(text: str) -> list[bytes]:
    """Return one hash per whole block of a text, over everything up to the block's end."""
    starts = _starts(len(text), CHARACTERS)
    return _hashes(b"", (text[at : at + CHARACTERS].encode(errors="replace") for at in starts))


def _starts(length: int, block: int) -> Iterator[int]:
    """Yield the starts of whole blocks, at most BLOCKS."""
    return islice(range(0, length - block + 1, block), BLOCKS)


def _hashes(first: bytes, parts: Iterable[bytes]) -> list[bytes]:
    running, out = blake2b(first, digest_size=16), []
    for part in parts:
        running.update(part)
        out.append(running.digest())
    return out
