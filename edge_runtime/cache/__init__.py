"""Bookkeeping of the paged KV cache: which page holds which tokens of which sequence.

It touches no device memory. The TypeScript runtime has the same three classes; both pass the vectors in
tests/vectors/cache.
"""

from nearfar.edge_runtime.cache.pages import PageAllocator
from nearfar.edge_runtime.cache.prefix import PrefixIndex, common_length
from nearfar.edge_runtime.cache.sequences import Copy, HeldPages, Sequence, SequenceTable
from nearfar.edge_runtime.cache.windows import Window

__all__ = [
    "Copy",
    "HeldPages",
    "PageAllocator",
    "PrefixIndex",
    "Sequence",
    "SequenceTable",
    "Window",
    "common_length",
]
