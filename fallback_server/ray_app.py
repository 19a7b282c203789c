"""The server as a Ray Serve application: `serve run nearfar.fallback_server.ray_app:app model=PATH
replicas=1:4`.

Two deployments: Front is the HTTP app, Engine the replicas of the model. Serve's proxy is the HTTP server
here. `nearfar serve --ray` has the same engines behind nearfar's own HTTP server, which bounds connections,
headers and slow readers too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from ray import serve

from nearfar.errors import RequestError
from nearfar.fallback_server.engines.local import LocalEngine
from nearfar.fallback_server.engines.opening import EngineKind, EngineOptions, text_source
from nearfar.fallback_server.http.app import AppOptions, create_app
from nearfar.fallback_server.http.keys import KeyStore
from nearfar.fallback_server.http.limits import ServerLimits
from nearfar.fallback_server.http.tracing import Tracer
from nearfar.fallback_server.ray_engine.client import RayBackend
from nearfar.fallback_server.ray_engine.cluster import engine_application, local_kind
from nearfar.fallback_server.ray_engine.options import RayOptions, parse_replicas


@dataclass(frozen=True)
class RayAppOptions:
    """The options that `serve run` or a Serve config file may give. Names and units are those of `nearfar
    serve`.

    `model` and `keys` are paths on every node (`model` may be a hub id). `fronts`: replicas of the HTTP app.
    """

    model: str
    engine: EngineKind = "auto"
    name: str | None = None
    device: str = EngineOptions.device
    dtype: str = EngineOptions.dtype
    threads: int | None = EngineOptions.threads
    kv_memory: str | None = EngineOptions.kv_memory
    kv_bits: int | None = EngineOptions.kv_bits
    program: str | None = EngineOptions.program
    max_running: int | None = EngineOptions.max_running
    keys: Path | None = None
    no_auth: bool = False
    max_requests: int = ServerLimits.requests
    strict_fields: bool = AppOptions.strict_fields
    store: bool = AppOptions.store
    fronts: int = 1
    replicas: str = "1"
    cpus_per_replica: float = RayOptions.cpus
    gpus_per_replica: float = RayOptions.gpus
    target_requests: float = RayOptions.target

    @property
    def engines(self) -> EngineOptions:
        """The engine options of each replica."""
        return EngineOptions(
            names=(self.name,) if self.name else (),
            device=self.device,
            dtype=self.dtype,
            threads=self.threads,
            kv_memory=self.kv_memory,
            kv_bits=self.kv_bits,
            program=self.program,
            max_running=self.max_running,
        )

    @property
    def ray(self) -> RayOptions:
        """The options of the engines' deployment."""
        low, high = parse_replicas(self.replicas)
        return RayOptions(
            min_replicas=low, max_replicas=high, cpus=self.cpus_per_replica, gpus=self.gpus_per_replica,
            target=self.target_requests,
        )  # fmt: skip


def app(arguments: Mapping[str, Any]) -> serve.Application:
    """Build the application from RayAppOptions, as Serve's builder protocol wants it. Values may be text.
    Raises RequestError for unknown or wrong options.
    """
    unknown = arguments.keys() - RayAppOptions.__dataclass_fields__.keys()
    if unknown:
        known = ", ".join(RayAppOptions.__dataclass_fields__)
        raise RequestError(f"{', '.join(sorted(unknown))}: there is no such option; there are {known}")
    try:
        return build(TypeAdapter(RayAppOptions).validate_python(dict(arguments)))
    except ValidationError as error:
        raise RequestError(f"the options of the application are wrong: {error}") from error


def build(options: RayAppOptions) -> serve.Application:
    """Return the Serve application for the options."""
    if options.keys is None and not options.no_auth:
        raise RequestError(
            "Serve's proxy can be reached from other machines: give keys=FILE, or no_auth=true", "keys"
        )
    kind = local_kind(options.model, options.engine)
    engines = engine_application(options.model, kind, options.engines, options.ray)
    front: Any = serve.ingress()(Front)
    deployment: Any = serve.deployment(
        front,
        name="Front",
        num_replicas=options.fronts,
        max_ongoing_requests=2 * options.max_requests,
        ray_actor_options={"num_cpus": 0.5},
    )
    made: serve.Application = deployment.bind(engines, options, kind)
    return made


class Front:
    """The HTTP app over the engines."""

    async def __init__(self, handle: Any, options: RayAppOptions, kind: EngineKind) -> None:  # type: ignore[misc]
        # Serve awaits a constructor, which type checkers do not know.
        source = text_source(options.model, kind, options.engines)
        backend = await RayBackend.connect(handle, options.ray)
        self._engine = LocalEngine(backend, source, options.engines.text, options.engines.names)
        await self._engine.start()
        keys = KeyStore(options.keys) if options.keys is not None else None
        limits = ServerLimits(requests=options.max_requests, fronts=options.fronts)
        made = AppOptions(
            limits,
            keys,
            tracer=Tracer.from_environment(),
            strict_fields=options.strict_fields,
            store=options.store,
        )
        self._app = create_app(self._engine, made)

    def __serve_build_asgi_app__(self) -> Any:
        """Return the ASGI app that Serve's `ingress` serves."""
        return self._app
