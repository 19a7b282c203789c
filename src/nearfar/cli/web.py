"""`nearfar web`: the chat page for one or several models, in the browser."""

import re
import webbrowser
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nearfar.cli.models import building
from nearfar.cli.page_server import Site, find_page, open_server, origin_of
from nearfar.cli.progress import bytes_bar, telling
from nearfar.edge_runtime.artifact.finder import by_target
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.errors import ArtifactError
from nearfar.store.making import artifacts_at, elsewhere

TARGETS = ("webgpu", "wasm")
"""The targets for browsers; a browser takes the first that it can run."""


def for_browsers(path: Path) -> Path | dict[str, Path]:
    """The artifact at `path` that a browser can run; by target, where a build wrote several."""
    there = by_target(path)
    found = {target: there[target] for target in TARGETS if target in there}
    if not found:
        raise ArtifactError(
            f"{path} holds artifacts only for {', '.join(sorted(there))}, and browsers run those for "
            f"{' and '.join(TARGETS)}: build them with nearfar build --target {','.join(TARGETS)}"
        )
    return found if len(found) > 1 else next(iter(found.values()))


@dataclass(frozen=True)
class Offer:
    """The server's offer to the page: artifacts by their folders below /artifact/, and the list of models."""

    artifacts: Path | Mapping[str, Path]
    models: tuple[Mapping[str, object], ...] = ()


def offer(paths: Sequence[Path]) -> Offer:
    """Offer one model, or several, each in a folder of its own, by the names in their manifests."""
    if len(paths) == 1:
        return Offer(for_browsers(paths[0]))
    found = [for_browsers(path) for path in paths]
    sides = [{"": side} if isinstance(side, Path) else side for side in found]
    opened = [Artifact.open(next(iter(side.values()))) for side in sides]
    artifacts: dict[str, Path] = {}
    models = []
    for name, side, artifact in zip(_names(opened), sides, opened, strict=True):
        folder = re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII).strip(".-") or "model"
        while any(taken.partition("/")[0] == folder for taken in artifacts):
            folder += "-"
        artifacts |= {f"{folder}/{target}" if target else folder: path for target, path in side.items()}
        models.append(_listed(name, folder, artifact, [target or artifact.target for target in side]))
    return Offer(artifacts, tuple(models))


def _names(artifacts: Sequence[Artifact]) -> list[str]:
    """A name for each artifact: its model, and where that is ambiguous, its quantization and a number."""
    models = [artifact.manifest.model.name for artifact in artifacts]
    schemes = [artifact.manifest.quantization.scheme for artifact in artifacts]
    count = Counter(models)
    names: list[str] = []
    for model, scheme in zip(models, schemes, strict=True):
        name = model if count[model] == 1 else f"{model} {scheme}"
        again = sum(each == name or each.startswith(f"{name} (") for each in names)
        names.append(f"{name} ({again + 1})" if again else name)
    return names


def _listed(name: str, folder: str, artifact: Artifact, backends: Sequence[str]) -> dict[str, object]:
    """One entry of models.json (web/docs/clients.md)."""
    manifest = artifact.manifest
    return {
        "name": name,
        "model": f"artifact/{folder}/",
        "bytes": manifest.weights.bytes + sum(file.bytes for file in manifest.tokenizer.files),
        "needs": {"backends": list(backends)},
        "contextLength": manifest.model.context_length,
        "license": manifest.license,
    }


def web(
    artifact: Annotated[
        list[str],
        typer.Argument(
            help="A webgpu or wasm artifact, or the OUT folder of a build; a checkpoint, a hub id or a name "
            "of the store, which is built for webgpu and wasm where it is not there yet; the "
            "URL of artifacts. The page offers a choice of several models.",
            show_default=False,
        ),
    ],
    port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, help="The port to listen on, or, if it is in use, the next free one; 0: any."
        ),
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
            help="A host name for browsers, besides this machine's own; may be repeated; '*': any name.",
            show_default=False,
        ),
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
) -> None:
    """Serve the chat page for one or several models and open it in the browser.

    Where a folder holds artifacts for webgpu and for wasm, the browser takes webgpu if it has a GPU.
    """
    if cloud is not None:
        origin_of(cloud)  # raises an error for an invalid address
    console = Console(stderr=True)
    browser = elsewhere(*TARGETS)  # many browsers have no GPU to offer
    ways = (building(console), telling(console), bytes_bar)
    offered = offer([artifacts_at(name, browser, *ways) for name in artifact])
    served = offered.artifacts
    site = Site(find_page(), served, cloud, hosts=tuple(allowed_host or ()), models=offered.models)
    shown = served if isinstance(served, Path) else ", ".join(map(str, served.values()))
    # From here on Ctrl-C is the normal way to end the server.
    with open_server(host, port, site) as server, suppress(KeyboardInterrupt):
        if port and server.server_port != port:
            typer.echo(f"Port {port} is in use; taking {server.server_port}.")
        typer.echo(f"Serving {shown} at {server.url}  (Ctrl-C ends)")
        if not no_open:
            webbrowser.open(server.url)
        server.serve_forever()
