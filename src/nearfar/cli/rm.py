"""`nearfar rm`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from nearfar.edge_runtime.artifact.budget import show_size
from nearfar.errors import StoreError
from nearfar.store.entries import Store


def rm(
    names: Annotated[
        list[str], typer.Argument(help="Names in the store (nearfar list).", show_default=False)
    ],
) -> None:
    """Remove models from the store. Their downloaded checkpoints stay in the hub's own cache."""
    store = Store()
    store.clear_removed()
    unfinished = store.unfinished()
    found = [
        store.find(name) or store.find(name, unfinished) or store.require(name) for name in names
    ]  # with one unknown name, nothing is removed
    for entry in found:
        if store.is_held(entry):
            raise StoreError(f"another process is making {entry.wanted.name}: wait for it, or end it")
    for entry in found:
        size = store.remove(entry)
        Console(stderr=True).print(f"removed {entry.wanted.name}, {show_size(size)}", highlight=False)
