"""The roles of a request's messages and the limits of a request, for every engine and the server, in Python
and TypeScript.
"""

from __future__ import annotations

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of messages that every chat template accepts; other roles (ipython, document) need a template that
names them.
"""
MAX_CHOICES = 128
"""The most answers to one prompt (`n`): OpenAI's limit, and far more than a device's slots run at once."""
MAX_TOOLS = 128
"""The most tools of a request, and the most calls of a message."""
MAX_TOOLS_BYTES = 1 << 20
"""The most bytes of all tools of a request as JSON in UTF-8 without blanks. Schemas have another bound."""
MAX_SCHEMAS_BYTES = 64 << 10
"""The most bytes of the schemas of all tools that an answer may call, as JSON without descriptions and other
annotations: a grammar is compiled from them.
"""
MAX_GRAMMAR_BYTES = 64 << 10
"""The most bytes of a grammar that a request gives: of its text, or of its schema as JSON."""
MAX_INPUTS = 2048
"""The most texts of a request for embeddings: OpenAI's limit. LangChain sends 1,000."""
MAX_STOPS = 16
"""The most strings that end an answer."""
MAX_VARIABLES = 16
"""The most variables for the chat template."""
MAX_LISTED = 256
"""The most values of a variable that is a list."""
MAX_LABELS = 256
"""The most labels of a decision."""
MAX_LABEL_CHARS = 1000
"""The most characters of a label."""
