"""`nearfar web`: the chat page for an artifact, in the browser."""

import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from nearfar.edge_runtime.artifact.finder import by_target, none_for
from nearfar.errors import ArtifactError
from nearfar.page_server import Site, find_page, open_server, origin_of

TARGETS = ("webgpu", "wasm")
"""What a browser runs; it takes the first that it can."""


def for_browsers(path: Path) -> Path | dict[str, Path]:
    """The artifact at `path` that a browser can run; by target, where a build put several side by side."""
    there = by_target(path)
    found = {target: there[target] for target in TARGETS if target in there}
    if not found:
        raise ArtifactError(none_for(path, TARGETS[0], there))
    return found if len(found) > 1 else next(iter(found.values()))


def web(
    artifact: Annotated[
        Path,
        typer.Argument(help="A webgpu or wasm artifact, or the OUT folder of a build.", show_default=False),
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
    """Serve the chat page for an artifact and open it in the browser.

    Where a folder holds artifacts for webgpu and for wasm, the browser takes webgpu if it has a GPU.
    """
    if cloud is not None:
        origin_of(cloud)  # refuses what is no address
    served = for_browsers(artifact)
    site = Site(find_page(), served, cloud, hosts=tuple(allowed_host or ()))
    shown = served if isinstance(served, Path) else ", ".join(map(str, served.values()))
    # Ctrl-C is how a server is meant to end, from the moment that it listens.
    with open_server(host, port, site) as server, suppress(KeyboardInterrupt):
        if port and server.server_port != port:
            typer.echo(f"Port {port} is in use; taking {server.server_port}.")
        typer.echo(f"Serving {shown} at {server.url}  (Ctrl-C ends)")
        if not no_open:
            webbrowser.open(server.url)
        server.serve_forever()
