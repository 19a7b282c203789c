"""The docstrings below constants: Python keeps them in the source only."""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise
from types import ModuleType


def meanings(owner: ModuleType | type) -> dict[str, str]:
    """The docstring below each constant of a module or a class, by name; constants without one are
    left out.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    body = tree.body
    if isinstance(owner, type):
        assert isinstance(body[0], ast.ClassDef)
        body = body[0].body
    found: dict[str, str] = {}
    for constant, below in pairwise(body):
        target = (
            constant.targets[0]
            if isinstance(constant, ast.Assign)
            else constant.target
            if isinstance(constant, ast.AnnAssign)
            else None
        )
        text = below.value if isinstance(below, ast.Expr) else None
        if isinstance(target, ast.Name) and isinstance(text, ast.Constant) and isinstance(text.value, str):
            found[target.id] = " ".join(text.value.split())
    return found
