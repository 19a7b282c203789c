"""`nearfar web`: the chat page for one artifact, in the browser."""

import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from nearfar.edge_runtime.artifact.finder import find_artifact
from nearfar.page_server import Site, find_page, open_server, origin_of

TARGET = "webgpu"
"""What a browser runs."""


def web(
    artifact: Annotated[
        Path, typer.Argument(help="A webgpu artifact, or the OUT folder of a build.", show_default=False)
    ],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The next free port is taken where it is in use; 0: any.")
    ] = 8080,
    host: Annotated[
        str, typer.Option(help="The address to listen on; the default is reachable from this machine only.")
    ] = "127.0.0.1",
    cloud: Annotated[
        str | None,
        typer.Option(
            help="An OpenAI-compatible server that answers what this device should not; it must allow the "
            "page's origin (CORS).",
            show_default=False,
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name that browsers may call it by, beside this machine's; may be repeated; '*': any.",
            show_default=False,
        ),
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
) -> None:
    """Serve the chat page for an artifact and open it in the browser."""
    if cloud is not None:
        origin_of(cloud)  # refuses what is no address
    site = Site(find_page(), find_artifact(artifact, TARGET), cloud, hosts=tuple(allowed_host or ()))
    # Ctrl-C is how a server is meant to end, from the moment that it listens.
    with open_server(host, port, site) as server, suppress(KeyboardInterrupt):
        if port and server.server_port != port:
            typer.echo(f"Port {port} is in use; taking {server.server_port}.")
        typer.echo(f"Serving {site.artifact} at {server.url}  (Ctrl-C ends)")
        if not no_open:
            webbrowser.open(server.url)
        server.serve_forever()
