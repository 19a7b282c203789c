"""The roles of a request's messages and the most that it may ask for, of every engine and the server, in
Python and TypeScript.
"""

from __future__ import annotations

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of messages that every chat template takes; others (ipython, document) are for templates that name
them.
"""
MAX_CHOICES = 128
"""Answers to one prompt, `n`: OpenAI's bound, and far more than a device's slots run at once."""
MAX_TOOLS = 128
"""Tools of a request, and calls of a message."""
MAX_INPUTS = 2048
"""Texts of a request for embeddings: OpenAI's bound. LangChain sends 1,000."""
MAX_STOPS = 16
"""Strings that end an answer."""
MAX_VARIABLES = 16
"""Variables for the chat template."""
MAX_LISTED = 256
"""Values of a variable that is a list."""
