"""`nearfar cp`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nearfar.build.output import output_directory
from nearfar.cli.models import Name
from nearfar.store.entries import Store


def cp(
    name: Name,
    out: Annotated[
        Path, typer.Argument(help="A directory; each target gets a sub-directory, as by a build.")
    ],
) -> None:
    """Copy a model's artifacts out of the store: to serve them, to take them to another machine."""
    entry = Store().require(name)
    for target, path in entry.targets.items():
        with output_directory(out / target) as folder:
            shutil.copytree(path, folder, dirs_exist_ok=True)
        Console(stderr=True).print(f"copied {out / target}", highlight=False)
