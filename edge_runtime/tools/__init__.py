"""Tools: how they are told to a model, the grammar that keeps calls to their schemas, and calls read back.

How a model writes all that is data: nearfar.format.answers.
"""
