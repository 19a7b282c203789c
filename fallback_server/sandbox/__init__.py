"""Runs work on untrusted input, which could run too long, in child processes that can be killed.

A thread cannot be stopped; a process can. Templates and tokenizers run in one kind of child, grammar
compilers (grammars/) in another.
"""

from nearfar.fallback_server.sandbox.process import ChildPool, ChildSpec

__all__ = ["ChildPool", "ChildSpec"]
