"""`nearfar route`: tools around the decision between device and cloud. One file a sub-command."""

from __future__ import annotations

import typer

from nearfar.cli.route_fit import fit, report
from nearfar.cli.route_log import log
from nearfar.cli.route_score import score

route = typer.Typer(
    help="Score how hard prompts are, and show routing decisions.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
)
route.command()(score)
route.command()(log)
route.command()(fit)
route.command()(report)


@route.callback()
def _group() -> None:
    """Keep this a group, even with one sub-command."""
