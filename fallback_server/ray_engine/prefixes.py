"""Which replica has seen the beginning of a prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

BLOCK = 16
"""Tokens that are hashed together: the pages of the engines' caches hold as many. Shorter prompts have no
affinity.
"""
BLOCKS = 256
"""Blocks of a prompt that are looked at: a longer common beginning changes nothing."""
REMEMBERED = 65536
"""Blocks whose replica is remembered; the longest unused are forgotten first."""


class PrefixMap:
    """Blocks of prompts, each hashed with all before it and the tenant's salt, and the replica that
    computed them last.
    """

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._replicas: OrderedDict[bytes, str] = OrderedDict()

    def known(self, tokens: Sequence[int], salt: str = "") -> list[str]:
        """Replicas that know a beginning of the prompt, the longest first."""
        found = (self._replicas.get(block) for block in reversed(_blocks(tokens, salt)))
        return list(dict.fromkeys(replica for replica in found if replica is not None))

    def remember(self, tokens: Sequence[int], replica: str, salt: str = "") -> None:
        """The replica computes this prompt now."""
        for block in _blocks(tokens, salt):
            self._replicas[block] = replica
            self._replicas.move_to_end(block)
        while len(self._replicas) > self._remembered:
            self._replicas.popitem(last=False)


def _blocks(tokens: Sequence[int], salt: str) -> list[bytes]:
    """A hash for each whole block, of everything up to its end. Two salts have no block in common, as in
    the caches.
    """
    running, out = blake2b(len(salt).to_bytes(8, "little") + salt.encode(), digest_size=16), []
    for start in range(0, min(len(tokens), BLOCK * BLOCKS) - BLOCK + 1, BLOCK):
        running.update(np.asarray(tokens[start : start + BLOCK], "<i8").tobytes())
        out.append(running.digest())
    return out
