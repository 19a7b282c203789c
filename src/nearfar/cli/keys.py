"""`nearfar keys`: add an API key to a file of `nearfar serve --keys`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nearfar.fallback_server.http.keys import Key, add_key, hashed, new_secret


def keys(
    file: Annotated[
        Path, typer.Argument(help="The keys file, TOML or .json; it is made if it does not exist.")
    ],
    name: Annotated[str, typer.Argument(help="Who uses the key; logs show this name.")],
    model: Annotated[
        list[str] | None, typer.Option(help="A model that the key may use; may be repeated.")
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="Requests a minute.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="Tokens a minute, of prompts and answers.")
    ] = None,
    tokens_per_day: Annotated[
        int | None, typer.Option(help="Tokens a day (UTC), prompts and answers.")
    ] = None,
    concurrent: Annotated[int | None, typer.Option(help="Requests at once.")] = None,
    cache_group: Annotated[str | None, typer.Option(help="Keys of a group share their prompt cache.")] = None,
    priority: Annotated[
        int, typer.Option(help="The least priority number of its requests; smaller numbers go first.")
    ] = 0,
    admin: Annotated[
        bool, typer.Option("--admin", help="The key is for /admin and /metrics, and nothing else.")
    ] = False,
) -> None:
    """Add an API key. The key is shown once and kept as a hash; a running server takes it within a second."""
    secret = new_secret()
    add_key(
        file,
        Key(
            name,
            hashed(secret),
            tuple(model or ("*",)),
            requests_per_minute,
            tokens_per_minute,
            concurrent,
            admin,
            cache_group,
            priority,
            tokens_per_day,
        ),
    )
    typer.echo(secret)
