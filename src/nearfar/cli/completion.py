"""`nearfar completion`: prints or installs the script that completes commands in a shell."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]  # there since typer 0.4
from typer.completion import install as install_script  # type: ignore[attr-defined]

from nearfar.cli import PROGRAM

VARIABLE = "_NEARFAR_COMPLETE"
COLONS = 'COMP_WORDBREAKS="${COMP_WORDBREAKS//:/}"  # names of models have colons, as smollm2:135m'


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="The shell.")],
    install: Annotated[
        bool,
        typer.Option("--install", help="Write the script to the file that the shell reads when it starts."),
    ] = False,
) -> None:
    """Print what lets a shell complete commands, options and names of models.

    `eval "$(nearfar completion bash)"` in ~/.bashrc, `eval "$(nearfar completion zsh)"` in ~/.zshrc after
    compinit, or `nearfar completion fish | source` in ~/.config/fish/config.fish; --install does it for you.
    """
    if install:
        _, path = install_script(shell, PROGRAM, VARIABLE)
        if shell == "bash":
            path.write_text(script(shell))
        print(f"wrote {path}; the next {shell} that you start reads it")
        return
    print(script(shell), end="")


def script(shell: str) -> str:
    """The completion script for a shell."""
    made = get_completion_script(prog_name=PROGRAM, complete_var=VARIABLE, shell=shell)
    return f"{made}\n{COLONS}\n" if shell == "bash" else f"{made}\n"
