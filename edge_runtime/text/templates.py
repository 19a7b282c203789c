"""Renders chat templates: programs that come with a model, with limits on their output and running time.

Jinja's sandbox keeps a template from reaching Python; it does not keep it from filling the memory or never
ending.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nearfar.errors import ArtifactError, RequestError

MOST_CHARACTERS = 16 << 20
"""The most characters of a rendered conversation, and of every intermediate text."""

MOST_STEPS = 1_000_000
"""The most loop iterations and calls. Templates use a few for each message."""

MOST_SECONDS = 10.0
MOST_BITS = 4096
"""The most bits of a number that a template computes."""

_STEPS_FILTER = "nearfar_steps"


class ChatTemplate:
    """A compiled template with the helpers that Hugging Face's templates expect."""

    def __init__(self, source: str) -> None:
        """Compile the template; ArtifactError if that fails."""
        self._source = source
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # the parser and Python's compiler have different errors for deep nesting
            raise ArtifactError(f"the chat template cannot be read: {_reason(error)}") from error

    def asks_for(self) -> frozenset[str]:
        """The names of the variables that the template reads."""
        made = _environment()
        return frozenset(
            jinja2.meta.find_undeclared_variables(made.parse(self._source)) - made.globals.keys()
        )

    def render(self, variables: Mapping[str, Any]) -> str:
        """Render the text; RequestError if the template refuses, fails, or exceeds a limit."""
        budget = _BUDGET.set(_Budget())
        pieces, size = [], 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                size += len(piece)
                _check_size(size)
        except Exception as error:  # any error here is the template's fault
            raise RequestError(
                f"the model's chat template rejects these messages: {_reason(error)}", "messages"
            ) from error
        finally:
            _BUDGET.reset(budget)
        return "".join(pieces)


def tree_of(source: str) -> nodes.Template:
    """Parse a template into Jinja's syntax tree."""
    return _environment().parse(source)


class _TooMuch(jinja2.TemplateError):
    """The template exceeds a limit."""


@dataclass
class _Budget:
    """The remaining steps of one rendering."""

    steps: int = MOST_STEPS
    until: float = field(default_factory=lambda: time.monotonic() + MOST_SECONDS)

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise _TooMuch(f"it takes more than {MOST_STEPS:,} steps")
        if self.steps % 64 == 0 and time.monotonic() > self.until:
            raise _TooMuch(f"it takes longer than {MOST_SECONDS:.0f} seconds")


_BUDGET: ContextVar[_Budget] = ContextVar("nearfar_template_budget")


class _Generator(CodeGenerator):
    """Generates code that counts the iterations of every loop, and limits the texts joined by `~`."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        for loop in node.find_all(nodes.For):
            loop.iter = nodes.Filter(
                loop.iter, _STEPS_FILTER, [], [], None, None, lineno=loop.lineno, environment=self.environment
            )
        super().visit_Template(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.write("str(")
            self.visit(part, frame)
            self.write("), ")
        self.write("))")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which no operation makes more than MOST_CHARACTERS."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    code_generator_class = _Generator

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        listed = list(parts)
        _check_size(sum(map(len, listed)))
        return "".join(listed)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_format(left, [right] if not isinstance(right, tuple) else list(right))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * abs(right))
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
        elif operator == "*":
            _check_size(_length(left) * _times(right) + _length(right) * _times(left))
        elif operator == "+":
            _check_size(_length(left) + _length(right))
        return super().call_binop(context, operator, left, right)

    # the signature is that of jinja's method
    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _BUDGET.get().step()
        method = getattr(__obj, "__wrapped__", __obj)  # str.format comes wrapped
        receiver = getattr(method, "__self__", None)
        if isinstance(receiver, str):
            _check_text(getattr(method, "__name__", ""), receiver, [*args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` … `{% endgeneration %}`: marks the model's own text for training.

    A prompt contains the body, whose variables stay inside, as in transformers.
    """

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> _Sandbox:
    made = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    made.filters = {name: _bounded(name, function) for name, function in made.filters.items()}
    made.filters["tojson"] = _tojson
    made.filters[_STEPS_FILTER] = _steps
    made.globals.pop("lipsum")
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


@jinja2.pass_context  # so that the function does not run at compile time
def _steps(_context: Any, items: Iterable[Any]) -> Iterator[Any]:
    """The items of a loop; each counts as a step."""
    budget = _BUDGET.get()
    for item in items:
        budget.step()
        yield item


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter so that its arguments are checked first."""
    passed = int(hasattr(function, "jinja_pass_arg"))  # the environment or the context comes first

    @functools.wraps(function)
    def check(*args: Any, **kwargs: Any) -> Any:
        if (budget := _BUDGET.get(None)) is not None:
            budget.step()
        value, others = (args[passed] if len(args) > passed else ""), [*args[passed + 1 :], *kwargs.values()]
        if name == "join":
            value = list(value)
            args = (*args[:passed], value, *args[passed + 1 :])
            _check_join(value, others)
        elif isinstance(value, str):
            _check_text(name, value, others)
        return function(*args, **kwargs)

    return check


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None and _times(indent) > 64:
        raise _TooMuch(f"it indents JSON by {indent}")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _check_text(name: str, text: str, args: list[Any]) -> None:
    """Check that the result of a method or filter on a text stays within MOST_CHARACTERS."""
    if name == "replace" and len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
        _check_size(len(text) + text.count(args[0]) * len(args[1]))
    elif name == "join":
        _check_join(args[0] if args and isinstance(args[0], (str, list, tuple)) else (), [text])
    elif name in ("format", "format_map"):
        _check_format(text, args)
    elif name == "translate" and args and isinstance(args[0], dict):
        _check_size(len(text) * max(map(_length, args[0].values()), default=1))
    else:
        places = 1 + text.count("\n") + text.count("\t")
        _check_size(len(text) + places * sum(_times(arg) + _length(arg) for arg in args))


def _check_join(parts: Sequence[Any], separators: list[Any]) -> None:
    _check_size(sum(len(str(part)) for part in parts) + len(parts) * sum(map(_length, separators)))


def _check_format(form: str, args: list[Any]) -> None:
    """Check that a format has no wide fields, by itself or by an argument."""
    widths = [int(width[:10]) for width in re.findall(r"\d+", form)]
    stars = [_times(arg) for arg in args] if "*" in form or "{:{" in form.replace(" ", "") else []
    _check_size(sum(widths) + sum(stars) + len(form) + form.count("{") * sum(map(_length, args)))


def _check_size(size: int) -> None:
    if size > MOST_CHARACTERS:
        raise _TooMuch(f"it makes a text or list of more than {MOST_CHARACTERS:,} parts")


def _check_bits(bits: int) -> None:
    if bits > MOST_BITS:
        raise _TooMuch(f"it makes a number of more than {MOST_BITS:,} bits")


def _length(value: object) -> int:
    return len(value) if isinstance(value, (str, list, tuple, dict)) else 0


def _times(value: object) -> int:
    return abs(value) if isinstance(value, int) else 0


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
