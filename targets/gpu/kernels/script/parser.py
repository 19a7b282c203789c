"""The script language of our kernels, a subset of TVMScript: Python code that builds the kernel when it runs.

TVM's own parser walks the tree of a script again for each kernel, evaluates every sub-expression separately,
and notes the location of each: three fifths of the CPU time that a build spent on GPU kernels. A script
serves all shapes of its kernel, so here it becomes Python code once, and making the kernel of a job runs that
code. The kernel equals the one that TVM's parser makes of the script (tests/unit/test_gpu_script.py). The
language has:

- `for i in T.serial(n)`, also `T.unroll`, `T.thread_binding`; `array[i] = value`;
- `if`, decided while the kernel is made, or, for an expression, when the kernel runs; likewise `and`, `or`,
  `not`, `a if b else c`, comparisons;
- `name: T.let = expression`; `name = …` for an array, a `T.int32()` or a `T.meta_var`; calls, for the
  statements that they write.

A name belongs to the loop, branch or kernel that binds it, and has one meaning there. Anything else is a
SyntaxError that names the line. docs/decisions/0026 gives the reasons.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import NoReturn

BUILD = "__build__"
"""The name, in the generated code, of the module that builds a kernel: statements.py."""
_PLAIN = (
    ast.Name, ast.Constant, ast.Attribute, ast.Subscript, ast.Call, ast.Starred, ast.keyword, ast.BinOp,
    ast.UnaryOp, ast.Tuple, ast.List, ast.JoinedStr, ast.FormattedValue, ast.operator, ast.unaryop,
    ast.expr_context,
)  # fmt: skip
"""Parts of an expression that Python itself evaluates."""
_COMPARED = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)


@dataclass(frozen=True)
class Script:
    """A kernel's script as code that defines the function `name`, and the names in its annotations."""

    code: CodeType
    name: str
    annotated: frozenset[str]


def parsed(func: Callable[..., None]) -> Script:
    """The script of a function."""
    return _parsed(func.__code__, func.__code__.co_filename)


@lru_cache(maxsize=256)
def _parsed(code: CodeType, filename: str) -> Script:
    """The script of a compiled function. `filename` is part of the key: equal code in another file may have
    other annotations.
    """
    lines, first = inspect.getsourcelines(code)
    (function,) = ast.parse(textwrap.dedent("".join(lines))).body
    ast.increment_lineno(function, first - 1)
    assert isinstance(function, ast.FunctionDef)
    annotations = [arg.annotation for arg in function.args.args if arg.annotation is not None]
    made = ast.Module([_Rewriter(filename).function(function)], [])
    ast.fix_missing_locations(made)
    compiled = compile(made, filename, "exec", dont_inherit=True)
    return Script(compiled, function.name, frozenset(_names(annotations)))


def _names(trees: Iterable[ast.AST]) -> set[str]:
    return {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}


class _Rewriter(ast.NodeTransformer):
    """Rewrites a script: expressions become expressions, and statements become lists of statements."""

    def __init__(self, filename: str) -> None:
        self.filename = filename
        self.scopes: list[set[str]] = []
        self.bound: set[str] = set()
        """All names that the kernel binds anywhere."""
        self.branches = 0

    def refuse(self, node: ast.AST, what: str) -> NoReturn:
        """Raise a SyntaxError at a node, for a script that no kernel can be made from."""
        line, column = getattr(node, "lineno", None), getattr(node, "col_offset", 0)
        raise SyntaxError(
            f"{what} (what the script of a kernel may have: nearfar/targets/gpu/kernels/script/parser.py)",
            (self.filename, line, column + 1, ast.unparse(node).splitlines()[0]),
        )

    # Names

    def bind(self, node: ast.AST, name: str) -> None:
        """Bind a name until the scope ends; SyntaxError if it is bound already."""
        if any(name in scope for scope in self.scopes):
            self.refuse(node, f"{name} is bound already")
        self.scopes[-1].add(name)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        known = any(node.id in scope for scope in self.scopes)
        if node.id in self.bound and not known:
            self.refuse(node, f"{node.id} is bound elsewhere in the kernel, not here")
        return node

    # Statements

    def function(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Rewrite a script's function to one that builds the kernel; its parameter is the module
        statements.py.
        """
        given, self.bound = node.args, _bound(node)
        if given.posonlyargs or given.kwonlyargs or given.vararg or given.kwarg or given.defaults:
            self.refuse(node, "a kernel's parameters have names and annotations, nothing else")
        if node.returns is not None or len(node.decorator_list) != 1:
            self.refuse(node, "a kernel has one decorator, and returns nothing")
        body: list[ast.stmt] = []
        self.scopes.append(set())
        for arg in given.args:
            if arg.annotation is None:
                self.refuse(arg, f"the parameter {arg.arg} has no annotation")
            kind = self.visit(arg.annotation)
            self.bind(arg, arg.arg)
            body += _at(arg, [_set(arg.arg, self.call("parameter", ast.Constant(arg.arg), kind))])
        body += self.body(node.body)
        self.scopes.pop()
        node.args = ast.arguments([], [ast.arg(BUILD)], None, [], [], None, [])
        node.body, node.decorator_list = body, []
        return node

    def body(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """The statements of one scope, which the caller has begun."""
        made: list[ast.stmt] = []
        for node in statements:
            visit = _STATEMENTS.get(type(node))
            if visit is None:
                self.refuse(node, f"a kernel has no statement {type(node).__name__}")
            made += _at(node, visit(self, node))
        return made

    def scope(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """The statements of a branch."""
        self.scopes.append(set())
        made = self.body(statements)
        self.scopes.pop()
        return made

    def loop(self, node: ast.For) -> list[ast.stmt]:
        """A loop becomes a `with` of its frame, which yields the variable; the variable is named first."""
        if not isinstance(node.target, ast.Name) or node.orelse:
            self.refuse(node, "a loop of a kernel is over one name, and has no else")
        name, frame = node.target.id, self.call("loop", self.visit(node.iter))
        self.scopes.append(set())
        self.bind(node.target, name)
        named = ast.Expr(self.call("named", ast.Constant(name), _get(name)))
        inside = [*_at(node, [named]), *self.body(node.body)]
        self.scopes.pop()
        return [ast.With([ast.withitem(frame, _to(name))], inside)]

    def branch(self, node: ast.If) -> list[ast.stmt]:
        """A branch becomes a `with` of the decision, with an `if` and a `with` of a frame inside for each
        case.
        """
        self.branches += 1
        name = f"__branch{self.branches}__"
        held = self.call("branch", self.visit(node.test))

        def part(asked: str, entered: str, statements: list[ast.stmt]) -> ast.stmt:
            frame = ast.Call(ast.Attribute(_get(name), entered, ast.Load()), [], [])
            inside: list[ast.stmt] = [ast.With([ast.withitem(frame)], self.scope(statements))]
            return ast.If(ast.Attribute(_get(name), asked, ast.Load()), inside, [])

        parts = [part("holds", "then", node.body)]
        if node.orelse:
            parts.append(part("fails", "otherwise", node.orelse))
        return [ast.With([ast.withitem(held, _to(name))], parts)]

    def assign(self, node: ast.Assign) -> list[ast.stmt]:
        """Rewrite an assignment: a store, or a name for an array."""
        target, value = node.targets[0], self.visit(node.value)
        if len(node.targets) == 1 and isinstance(target, ast.Subscript):
            index = self.visit(target.slice)
            places = index if isinstance(index, ast.Tuple) else ast.List([index], ast.Load())
            return [ast.Expr(self.call("store", value, places, self.visit(target.value)))]
        if len(node.targets) != 1 or not isinstance(target, ast.Name):
            self.refuse(node, "one name, or one place of an array, is assigned at a time")
        self.bind(node, target.id)
        return [_set(target.id, self.call("bind", ast.Constant(target.id), value))]

    def let(self, node: ast.AnnAssign) -> list[ast.stmt]:
        """Rewrite a T.let: a name for an expression."""
        if not isinstance(node.target, ast.Name) or node.value is None:
            self.refuse(node, "T.let gives one name to a value")
        if ast.unparse(node.annotation) != "T.let":
            self.refuse(node, f"{ast.unparse(node.annotation)} annotates a name, where T.let is meant")
        value = self.visit(node.value)
        self.bind(node, node.target.id)
        return [_set(node.target.id, self.call("let", ast.Constant(node.target.id), value))]

    def expression(self, node: ast.Expr) -> list[ast.stmt]:
        """Rewrite an expression statement: a call, for what it writes; docstrings are dropped."""
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return []
        if not isinstance(node.value, ast.Call):
            self.refuse(node, "a statement that is an expression is a call")
        return [ast.Expr(self.call("evaluate", self.visit(node.value)))]

    # Expressions

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if not isinstance(node, _PLAIN):
            self.refuse(node, f"a kernel has no expression {type(node).__name__}")
        return super().generic_visit(node)

    def visit_ListComp(self, node: ast.ListComp) -> ast.expr:
        """Rewrite a list made by one `for` of one name, over values known when the kernel is made."""
        (made, *more) = node.generators
        if more or made.ifs or made.is_async or not isinstance(made.target, ast.Name):
            self.refuse(node, "a list in a kernel is made by one `for`, of one name and without `if`")
        over = self.visit(made.iter)
        self.scopes.append(set())
        self.bind(made.target, made.target.id)
        element = self.visit(node.elt)
        self.scopes.pop()
        return ast.ListComp(element, [ast.comprehension(made.target, over, [], 0)])

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        (kind, *more), left, right = node.ops, self.visit(node.left), self.visit(node.comparators[0])
        if more:
            self.refuse(node, "two are compared at a time")
        if isinstance(kind, ast.Is | ast.IsNot):
            return ast.Compare(left, [kind], [right])
        if not isinstance(kind, _COMPARED):
            self.refuse(node, f"a kernel has no comparison {type(kind).__name__}")
        return self.call("compared", ast.Constant(type(kind).__name__), left, right)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        values = [_later(self.visit(value)) for value in node.values]
        return self.call("every" if isinstance(node.op, ast.And) else "some", *values)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        if isinstance(node.op, ast.Not):
            return self.call("negated", self.visit(node.operand))
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        chosen = (_later(self.visit(value)) for value in (node.body, node.orelse))
        return self.call("chosen", self.visit(node.test), *chosen)

    def call(self, function: str, *args: ast.expr) -> ast.expr:
        """A call of a function of statements.py."""
        return ast.Call(ast.Attribute(_get(BUILD), function, ast.Load()), list(args), [])


_STATEMENTS: dict[type[ast.stmt], Callable[..., list[ast.stmt]]] = {
    ast.For: _Rewriter.loop, ast.If: _Rewriter.branch, ast.Assign: _Rewriter.assign,
    ast.AnnAssign: _Rewriter.let, ast.Expr: _Rewriter.expression,
}  # fmt: skip


def _bound(node: ast.FunctionDef) -> set[str]:
    """The names that a kernel binds anywhere, except those of list comprehensions."""
    inside = {
        id(name)
        for made in ast.walk(node)
        if isinstance(made, ast.comprehension)
        for name in ast.walk(made.target)
    }
    stored = {
        each.id
        for each in ast.walk(node)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store) and id(each) not in inside
    }
    return stored | {arg.arg for arg in node.args.args}


def _at(node: ast.AST, statements: list[ast.stmt]) -> list[ast.stmt]:
    """Give statements the line of the node that they replace, for tracebacks: its first line, since Python
    locates a call of an attribute at its end.
    """
    for each in statements:
        ast.copy_location(each, node)
        if each.end_lineno != each.lineno:
            each.end_lineno, each.end_col_offset = each.lineno, each.col_offset
    return statements


def _get(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _to(name: str) -> ast.Name:
    return ast.Name(name, ast.Store())


def _set(name: str, value: ast.expr) -> ast.stmt:
    return ast.Assign([_to(name)], value)


def _later(value: ast.expr) -> ast.expr:
    """A lambda that delays the evaluation of an expression."""
    return ast.Lambda(ast.arguments([], [], None, [], [], None, []), value)
