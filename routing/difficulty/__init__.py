"""Scores how hard a prompt looks, from 0 to 1: a small linear model over surface features, without a
tokenizer.
"""

from nearfar.routing.difficulty.score import Difficulty, messages_to_prompt, score

__all__ = ["Difficulty", "messages_to_prompt", "score"]
