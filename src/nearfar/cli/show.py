"""`nearfar show`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from nearfar.cli.drawing import print_table
from nearfar.cli.list import described
from nearfar.cli.models import Name
from nearfar.cli.streams import print_json
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.store.entries import Entry, Store


def show(
    name: Name,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the card of a model: licence, context length, chat template with its variables, sampling defaults,
    end tokens, origin.
    """
    entry = Store().require(name)
    artifact = Artifact.open(next(iter(entry.targets.values())))
    codec = TextCodec.open(artifact)
    card = _card(entry, artifact, codec)
    if as_json:
        print_json(card)
        return
    table = Table.grid(padding=(0, 2))
    for key, value in {**card, "sampling": artifact.manifest.sampling.told}.items():
        table.add_row(key.replace("_", " "), escape(_plain(value)))
    print_table(table)


def _card(entry: Entry, artifact: Artifact, codec: TextCodec) -> dict[str, Any]:
    manifest = artifact.manifest
    form = manifest.answers
    return {
        **described(entry),
        "architecture": manifest.model.architecture,
        "parameters": sum(p.n * max(p.k, 1) for p in manifest.step.parameters),
        "context": manifest.model.context_length,
        "begins_with": _token(codec, manifest.model.bos_token_id),
        "ends_with": [_token(codec, token) for token in manifest.model.eos_token_ids],
        "template": codec.has_template,
        "template_variables": codec.template_variables(),
        "tools": bool(form and form.calls),
        "reasoning": bool(form and form.reasoning),
        "sampling": manifest.sampling.given,
        "license": manifest.license or "not stated",
        "provenance": manifest.provenance,
    }


def _token(codec: TextCodec, token: int | None) -> str | None:
    """A token by its number and its text."""
    return None if token is None else f"{token} {codec.tokenizer.id_to_token(token)}"


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value if value is not None else "")
