"""Tools: how they are described to a model, the grammar that enforces their schemas, and how
calls are read.

The marks that each model writes are data: nearfar.format.answers.
"""
