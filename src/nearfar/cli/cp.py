"""`nearfar cp`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nearfar.build.output import output_directory
from nearfar.cli.models import Name
from nearfar.errors import StoreError
from nearfar.paths import check_place
from nearfar.room import lacking
from nearfar.store.entries import Store


def cp(
    name: Name,
    out: Annotated[
        Path, typer.Argument(help="A directory; each target gets a sub-directory, as by a build.")
    ],
) -> None:
    """Copy a model's artifacts out of the store: to serve them, to take them to another machine."""
    check_place(out)
    entry = Store().require(name)
    if lack := lacking(out, entry.bytes):
        raise StoreError(f"copying {entry.wanted.name} {lack}: free some space, or choose another directory")
    for target, path in entry.targets.items():
        with output_directory(out / target) as folder:
            try:
                shutil.copytree(path, folder, dirs_exist_ok=True)
            except shutil.Error as error:  # the error lists all files; one message is enough
                raise StoreError(f"{out / target} cannot be written: {error.args[0][0][2]}") from error
        Console(stderr=True).print(f"copied {out / target}", highlight=False)
