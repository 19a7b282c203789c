"""Finds models by name, for the commands that run or keep them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from nearfar.cli.progress import bytes_bar, telling
from nearfar.edge_runtime.artifact.finder import holds_artifacts
from nearfar.errors import StoreError
from nearfar.hub import no_path
from nearfar.store.entries import Store
from nearfar.store.known import KNOWN
from nearfar.store.making import Build, artifacts_at, for_device

if TYPE_CHECKING:
    from nearfar.build.options import BuildOptions


def named(incomplete: str) -> list[str]:
    """Completions of a name: models of the store, and known short names."""
    found = {*there(incomplete), *KNOWN}
    return sorted(name for name in found if name.startswith(incomplete))


def there(incomplete: str) -> list[str]:
    """Completions of a name from the store."""
    names = {entry.wanted.name for entry in Store().entries()}
    return sorted(name for name in names if name.startswith(incomplete))


Model = Annotated[
    str,
    typer.Argument(
        help="An artifact, or the directory that `nearfar build` wrote; a checkpoint, a hub id or a name of "
        "the store (`nearfar list`), which is built into the store where it is not there yet; the URL of "
        "artifacts, which are fetched into it.",
        show_default=False,
        autocompletion=named,
    ),
]
Adapter = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        help="A LoRA adapter that peft has saved, a folder or a hub id: it is merged into the model, which "
        "is built into the store under both names. An adapter alone, in place of the model, is merged into "
        "the model that it names.",
        show_default=False,
    ),
]
Kept = Annotated[
    str,
    typer.Argument(
        help="An artifact, or the directory that `nearfar build` wrote: then the best target of it; or a "
        "name of the store (`nearfar list`).",
        show_default=False,
        autocompletion=there,
    ),
]
Name = Annotated[
    str,
    typer.Argument(
        help="The name of the model in the store (nearfar list).", show_default=False, autocompletion=there
    ),
]


def artifacts_of(
    given: str, device: str, *, chats: bool = False, adapter: str | None = None, looked: bool = False
) -> Path:
    """The folder of a model's artifacts, which are built for `device` (as in --device) if they do not exist.
    `chats`: models without a chat template are refused before the build. `adapter`: the LoRA adapter that is
    merged into the model. `looked`: `first_look` has accepted the checkpoint already.
    """
    console, runner = Console(stderr=True), replace(for_device(device), chats=chats)
    return artifacts_at(given, runner, building(console), telling(console), bytes_bar, adapter, looked)


def kept(given: str) -> Path:
    """The artifacts of a path, or of a model in the store. Raises StoreError where they do not exist."""
    path, store = Path(given).expanduser(), Store()
    if path.is_dir() and holds_artifacts(path):
        return path
    if (entry := store.find(given)) is not None:
        return entry.folder
    if path.exists():
        return path  # opening the file reports what it is instead
    if (told := no_path(given)) is not None:
        raise StoreError(told)
    return store.require(given).folder


def building(console: Console) -> Build:
    """A function that builds, with progress bars on a terminal."""

    def build(options: BuildOptions) -> None:
        from nearfar.cli.build import build_shown

        build_shown(options, console)

    return build
