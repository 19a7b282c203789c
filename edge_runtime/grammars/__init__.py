"""Constraints on answers: JSON schemas as grammars enforce them, and grammars followed token by token.

Importing this imports no grammar library: llguidance is loaded by the first request that needs it.
"""

from nearfar.edge_runtime.grammars.bounded import BoundedCache, key_of
from nearfar.edge_runtime.grammars.grammar import Grammar

__all__ = ["BoundedCache", "Grammar", "key_of"]
