"""Grammars that answers must match: compiled by xgrammar in a child process, loaded where tokens are sampled.

Importing this package does not import xgrammar, which brings PyTorch with it.
"""

from nearfar.fallback_server.grammars.compiled import CompiledGrammars
from nearfar.fallback_server.grammars.constraint import TokenConstraint
from nearfar.fallback_server.grammars.service import GrammarService

__all__ = ["CompiledGrammars", "GrammarService", "TokenConstraint"]
