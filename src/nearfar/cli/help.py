"""Formats `--help`: each option on a line of its own, and its text below it.

In typer's two columns, texts have 18 columns of an 80-column terminal, and names are cut.
"""

from __future__ import annotations

import inspect
from typing import Any

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.padding import Padding
from rich.text import Text

ARGUMENTS, OPTIONS = "Arguments", "Options"
WIDEST = 110
"""Columns beyond which lines are hard to read."""


_MUST = {
    "int_parsing": "it must be a whole number",
    "int_from_float": "it must be a whole number",
    "float_parsing": "it must be a number",
    "greater_than_equal": "it must be at least {ge}",
    "less_than_equal": "it must be at most {le}",
}
"""Messages for pydantic's types of errors: typer would print pydantic's words without the refused value."""


class Command(typer.core.TyperCommand):
    """A command with this help, and with messages that name refused values."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command's arguments; an error names the refused value."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            told: list[Any] = getattr(error.__cause__, "errors", list)()
            if told and told[0]["type"] in _MUST:
                must = _MUST[told[0]["type"]].format_map(told[0].get("ctx", {}))
                error.message = f"{must}, not {told[0]['input']!r:.80}"
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        console = Console(highlight=False)
        console.width = min(console.width, WIDEST)
        console.print(Padding(Text(self.get_usage(ctx), style="bold"), (1, 1), expand=False))
        if self.help:
            console.print(Padding(Markdown(inspect.cleandoc(self.help)), (0, 1, 1, 1)))
        for title, records in self._sections(ctx).items():
            console.print(Text(f" {title}", style="bold"))
            for names, text in records:
                console.print(Padding(Text(names, style="cyan"), (0, 1, 0, 3), expand=False))
                if text:
                    console.print(Padding(Markdown(text), (0, 1, 0, 8)))
            console.print()

    def _sections(self, ctx: Any) -> dict[str, list[tuple[str, str]]]:
        """Names and texts of arguments and options by heading: arguments first, options without a heading
        last.
        """
        found: dict[str, list[tuple[str, str]]] = {ARGUMENTS: []}
        rest: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            if param.param_type_name == "argument":
                found[ARGUMENTS].append(record)
            elif panel := getattr(param, "rich_help_panel", None):
                found.setdefault(panel, []).append(record)
            else:
                rest.append(record)
        return {title: records for title, records in {**found, OPTIONS: rest}.items() if records}
