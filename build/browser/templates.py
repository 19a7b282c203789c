"""Finds out at build time whether the web engine renders a chat template as transformers does.

`names.json` lists what the web engine knows (web/src/worker/text/jinja); tests/unit/test_template_parity.py
checks that the list is right, and that both render its entries alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

from jinja2 import nodes

from nearfar.edge_runtime.text.templates import tree_of

_NODES: Final = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.Name, nodes.NSRef, nodes.Const, nodes.Tuple,
    nodes.List, nodes.Dict, nodes.Pair, nodes.Keyword, nodes.CondExpr, nodes.BinExpr, nodes.UnaryExpr,
    nodes.Concat, nodes.Compare, nodes.Operand, nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Call,
    nodes.Filter, nodes.Test, nodes.If, nodes.For, nodes.Break, nodes.Continue, nodes.Assign,
    nodes.AssignBlock, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.With,
    nodes.ExtensionAttribute,
)  # fmt: skip
_ESCAPING: Final = ("e", "escape", "safe")
"""Filters that mark a text as safe, and so change how texts that are later joined to it are escaped."""
_DEFAULTS: Final = ("d", "default")
"""Filters that replace an undefined value; the web engine replaces it with "" where the default is undefined,
too.
"""
_NAMED: Final = ("split", "rsplit", "splitlines")
"""Methods whose arguments Python also takes by name."""
_PLAIN_FIELD: Final = re.compile(r"\{\{|\}\}|\{(?:\d+|[^\W\d]\w*)?\}")
_FORMAT: Final = re.compile(r"%%|%(?:\(.*?\))?(?:[srdif]|\.\d{1,2}f)")
_PYTHON: Final = {name for kind in (str, dict, list, tuple) for name in dir(kind)}
_GLOBALS: Final = {"range", "dict", "lipsum", "cycler", "joiner", "namespace"}
_TESTING: Final = {"select": 0, "reject": 0, "selectattr": 1, "rejectattr": 1}
"""Filters that take the name of a test, each with the position of that argument."""


@cache
def known() -> dict[str, Any]:
    """The names that the web engine knows: the content of names.json."""
    names: dict[str, Any] = json.loads(Path(__file__).with_name("names.json").read_text(encoding="utf-8"))
    return names


def unknown_in(template: str) -> list[str]:
    """Names the parts of a template that the web engine renders otherwise than transformers, with lines."""
    found = [f"{what} in line {line}" for what, line in _found(template)]
    return list(dict.fromkeys(found))


def _found(template: str) -> Iterator[tuple[str, int]]:
    if at := re.search(r"\\N\{", template):
        yield "an escape \\N{…} of a text", template.count("\n", 0, at.start()) + 1
    if at := re.search(r"\{%[-+]?\s*print\b", template):
        yield "the tag print", template.count("\n", 0, at.start()) + 1
    tree = tree_of(template)
    for node, above in _all(tree, None):
        for what in _of(node, above):
            yield what, node.lineno


def _all(node: nodes.Node, above: nodes.Node | None) -> Iterator[tuple[nodes.Node, nodes.Node | None]]:
    yield node, above
    for child in node.iter_child_nodes():
        yield from _all(child, node)


def _of(node: nodes.Node, above: nodes.Node | None) -> Iterator[str]:
    """Yield what the web engine renders differently in one node."""
    if not isinstance(node, _NODES):
        yield f"a {type(node).__name__} node"
    elif isinstance(node, nodes.Filter):
        yield from _filter(node, above)
    elif isinstance(node, nodes.Test):
        yield from _test(node)
    elif isinstance(node, nodes.Getattr):
        yield from _attribute(node, above)
    elif isinstance(node, nodes.Call):
        yield from _call(node)
    elif (
        isinstance(node, nodes.Mod)
        and isinstance(node.left, nodes.Const)
        and isinstance(node.left.value, str)
    ):
        yield from _formatted(node.left.value)
    elif isinstance(node, nodes.Macro):
        for name in node.find_all(nodes.Name):
            if name.name in ("varargs", "kwargs"):
                yield f"{name.name} of a macro"
    elif isinstance(node, nodes.Name) and node.name == "self":
        yield "self"
    elif isinstance(node, nodes.Pair) and _is_odd_key(node.key):
        yield "a key of a dict that is neither a text nor a whole number"


def _is_odd_key(key: nodes.Expr) -> bool:
    if isinstance(key, nodes.Const):
        return isinstance(key.value, (bool, float))
    return isinstance(key, nodes.Tuple)


def _filter(node: nodes.Filter, above: nodes.Node | None) -> Iterator[str]:
    filters = known()["filters"]
    if node.name not in filters:
        yield f"the filter {node.name!r}"
        return
    if node.name in _ESCAPING and not isinstance(above, (nodes.Output, nodes.Concat)):
        yield f"the filter {node.name!r} before another operation"
    yield from _arguments(f"the filter {node.name!r}", filters[node.name], node)
    given = [*node.args[:1], *(each.value for each in node.kwargs)]
    if node.name in _DEFAULTS and any(
        isinstance(each, nodes.Name) and each.name == "undefined" for each in given
    ):
        yield f"the undefined default of the filter {node.name!r}"
    if node.name == "map" and node.args:
        yield from _named(node.args[0], filters, "filter")
    if (place := _TESTING.get(node.name)) is not None and len(node.args) > place:
        yield from _named(node.args[place], known()["tests"], "test")
    if node.name == "format" and isinstance(node.node, nodes.Const) and isinstance(node.node.value, str):
        yield from _formatted(node.node.value)


def _named(name: nodes.Expr, names: dict[str, Any], kind: str) -> Iterator[str]:
    if not isinstance(name, nodes.Const):
        yield f"a {kind} whose name is computed"
    elif name.value not in names:
        yield f"the {kind} {name.value!r}"


def _test(node: nodes.Test) -> Iterator[str]:
    tests = known()["tests"]
    if node.name not in tests:
        yield f"the test {node.name!r}"
    elif len(node.args) != tests[node.name] or node.kwargs or node.dyn_args or node.dyn_kwargs:
        yield f"these arguments of the test {node.name!r}"
    elif node.name == "sameas" and _is_no_object(node.args[0]):
        yield "the test 'sameas' of a text or number"


def _is_no_object(value: nodes.Expr) -> bool:
    return isinstance(value, nodes.Const) and not isinstance(value.value, bool | None)


def _attribute(node: nodes.Getattr, above: nodes.Node | None) -> Iterator[str]:
    methods = known()["methods"]
    if node.attr.startswith("__"):
        yield f"the attribute {node.attr!r}"
    elif node.attr in _PYTHON and not any(node.attr in names for names in methods.values()):
        called = isinstance(above, nodes.Call) and above.node is node
        # The template means a key of that name, unless every dict has a method of that name.
        if called or node.attr in dir(dict):
            yield f"the method {node.attr!r}"


def _call(node: nodes.Call) -> Iterator[str]:
    if isinstance(node.node, nodes.Getattr):
        name = node.node.attr
        if name == "format":
            yield from _fields(node.node.node)
            return
        given = [names[name] for names in known()["methods"].values() if name in names]
        if given and all(list(_arguments("", names, node)) for names in given):
            yield f"these arguments of the method {name!r}"
        elif given and node.kwargs and name not in _NAMED:
            yield f"arguments by name of the method {name!r}"
    elif isinstance(node.node, nodes.Name):
        name = node.node.name
        if name in _GLOBALS and name not in known()["globals"]:
            yield f"the function {name!r}"
        if name == "strftime_now" and node.args and isinstance(node.args[0], nodes.Const):
            yield from _time(str(node.args[0].value))


def _fields(receiver: nodes.Expr) -> Iterator[str]:
    """Yield the parts of a `text.format()` call beyond plain fields like `{}` and `{name}`."""
    if not isinstance(receiver, nodes.Const):
        yield "format() of a text that is computed"
    elif "{" in (rest := _PLAIN_FIELD.sub("", str(receiver.value))) or "}" in rest:
        yield "format() with more than plain fields"


def _arguments(what: str, names: str | None, node: nodes.Filter | nodes.Call) -> Iterator[str]:
    """Yield the arguments of a call beyond the known `names` (separated by spaces); None allows any
    arguments.
    """
    if names is None:
        return
    order = names.split()
    if len(node.args) > len(order):
        yield f"{len(node.args)} arguments of {what}"
    for keyword in node.kwargs:
        if keyword.key not in order:
            yield f"the argument {keyword.key!r} of {what}"


def _formatted(form: str) -> Iterator[str]:
    if "%" in _FORMAT.sub("", form):
        yield f"the format {form!r}"


def _time(form: str) -> Iterator[str]:
    for all_, code in re.findall(r"(%[-_0^]?(.?))", form, re.DOTALL):
        if not code or code not in known()["strftime"]:
            yield f"{all_!r} of strftime_now"
