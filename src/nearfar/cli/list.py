"""`nearfar list`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from nearfar.cli.drawing import print_table
from nearfar.cli.streams import print_json
from nearfar.edge_runtime.artifact.budget import show_size
from nearfar.store.entries import Entry, Store


def list(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the models of the store, the most recently used first."""
    store = Store()
    store.clear_removed()
    entries = [*store.entries(), *store.unfinished()]
    if as_json:
        print_json([described(entry) for entry in entries])
        return
    if not entries:
        Console(stderr=True).print(f"no models in {store.root}: nearfar pull NAME gets one", highlight=False)
        return
    table = Table("name", "targets", "weights", "size", "last used", "from", box=None)
    table.columns[0].no_wrap = True  # users copy names from here
    for entry in entries:
        used = f"{entry.used.astimezone():%Y-%m-%d %H:%M}"
        made = ", ".join(entry.targets) if entry.finished else _state(store, entry)
        row = (made, entry.scheme or "", show_size(entry.bytes), used)
        table.add_row(entry.wanted.name, *row, entry.wanted.source)
    print_table(table)
    if any(not entry.finished for entry in entries):
        told = "unfinished: the same command continues it, nearfar rm NAME removes it"
        Console(stderr=True).print(told, highlight=False, soft_wrap=True)


def _state(store: Store, entry: Entry) -> str:
    return "being made" if store.is_held(entry) else "unfinished"


def described(entry: Entry) -> dict[str, object]:
    """An entry as JSON."""
    return {
        "name": entry.wanted.name,
        "source": entry.wanted.source,
        "quant": entry.wanted.quant,
        "requantize": entry.wanted.requantize,
        "quality": entry.wanted.quality,
        "quantization": entry.scheme,
        "finished": entry.finished,
        "targets": [*entry.targets],
        "bytes": entry.bytes,
        "used": entry.used.isoformat(timespec="seconds"),
        "path": str(entry.folder),
    }
