"""Checks whether the grammar libraries accept a text: llguidance, which devices use, and xgrammar, which the
server uses.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from nearfar.edge_runtime.grammars import Grammar
from nearfar.edge_runtime.grammars.compiler import Grammars
from nearfar.edge_runtime.grammars.constraint import GrammarConstraint
from nearfar.edge_runtime.text.codec import TextCodec

EOS = 257
Match = Callable[[str], bool]


async def followed(codec: TextCodec, grammar: Grammar) -> Match:
    """Whether llguidance accepts a text: each token is in the mask before it, and then the end."""
    grammars = Grammars(codec, EOS + 1, [EOS])
    first = (await grammars.constraints(grammar, 1))[0]

    def match(text: str) -> bool:
        constraint = GrammarConstraint(first._matcher.deep_copy(), EOS + 1)
        # The text is encoded in parts, so that no special token of the tokenizer stands for a mark.
        tokens = [token for part in re.split("(?<=<)", text) for token in codec.encode_raw(part)]
        for token in [*tokens, EOS]:
            if constraint.complete_at is not None:
                return token == EOS
            words = constraint.allowed()
            if not words[token // 32] >> token % 32 & 1:
                return False
            constraint.accept(token)
        return True

    grammars.close()
    return match


def served(grammar: Grammar) -> Match:
    """Whether xgrammar accepts a text."""
    xgrammar = pytest.importorskip("xgrammar")
    from nearfar.fallback_server.grammars.compiled import compiler

    pieces = [bytes([byte]) for byte in range(256)] + [b""]
    made = compiler(xgrammar.TokenizerInfo(pieces, vocab_size=257, stop_token_ids=[256]))(grammar)

    def match(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(made)
        return bool(matcher.accept_string(text)) and bool(matcher.accept_token(256))

    return match
