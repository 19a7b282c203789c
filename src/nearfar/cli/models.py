"""Models by name: what the commands that run one, and those that keep them, have in common."""

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
    """Names that a word may become: of the store, and the known ones."""
    found = {*there(incomplete), *KNOWN}
    return sorted(name for name in found if name.startswith(incomplete))


def there(incomplete: str) -> list[str]:
    """Names of the store that a word may become."""
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
    typer.Argument(help="Its name in the store (nearfar list).", show_default=False, autocompletion=there),
]


def artifacts_of(given: str, device: str, *, chats: bool = False) -> Path:
    """The artifacts that a name means, built for a device as --device names it where they are not there.
    `chats`: none is built of a model without a chat template.
    """
    console, runner = Console(stderr=True), replace(for_device(device), chats=chats)
    return artifacts_at(given, runner, building(console), telling(console), bytes_bar)


def kept(given: str) -> Path:
    """The artifacts of a path, or of a name of the store, which has to be there already: else StoreError."""
    path, store = Path(given).expanduser(), Store()
    if path.is_dir() and holds_artifacts(path):
        return path
    if (entry := store.find(given)) is not None:
        return entry.folder
    if path.exists():
        return path  # what it is instead is told by who opens it
    if (told := no_path(given)) is not None:
        raise StoreError(told)
    return store.require(given).folder


def building(console: Console) -> Build:
    """Builds, with bars where somebody looks."""

    def build(options: BuildOptions) -> None:
        from nearfar.cli.build import build_shown

        build_shown(options, console)

    return build
