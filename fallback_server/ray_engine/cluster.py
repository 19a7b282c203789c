"""Runs engines on a Ray cluster: connects to it or starts one here, deploys, and removes what was started."""

from __future__ import annotations

import asyncio
import logging
import os
from importlib import import_module
from typing import Any

from nearfar.children import keys_hidden
from nearfar.errors import EngineError, RequestError
from nearfar.fallback_server.engines.local import LocalEngine
from nearfar.fallback_server.engines.opening import EngineKind, EngineOptions, guess, text_source
from nearfar.fallback_server.ray_engine.options import RayOptions

log = logging.getLogger(__name__)

OBJECT_STORE = 100 << 20
"""Bytes of shared memory for a Ray started here. Nothing large goes through it; Ray requires at least 75 MiB.
"""
ENGINE = "Engine"
STARTS = 4
"""Attempts to start Ray here. It gives its agents 15 s, which two busy cores need for the imports alone."""
QUIET = {"log_level": "WARNING"}


async def open_on_ray(
    model: str, kind: EngineKind, engines: EngineOptions, options: RayOptions
) -> LocalEngine:
    """Deploy replicas of the model and return them as one engine. Closing it deletes them.

    Every node needs nearfar, and the model under the same path or hub id.
    """
    kind = local_kind(model, kind)
    source = await asyncio.to_thread(text_source, model, kind, engines)
    handle = await asyncio.to_thread(_deploy, model, kind, engines, options)

    async def close() -> None:
        await asyncio.to_thread(_take_down, options)

    from nearfar.fallback_server.ray_engine.client import RayBackend

    backend = None
    try:
        backend = await RayBackend.connect(handle, options, close)
        engine = LocalEngine(backend, source, engines.text, engines.names)
        await engine.start()
    except BaseException:
        await close()
        raise
    return engine


def local_kind(model: str, kind: EngineKind) -> EngineKind:
    """Return the kind of engine of a replica, torch or artifact. Raises RequestError for addresses."""
    kind = guess((model,)) if kind == "auto" else kind
    if kind == "upstream":
        raise RequestError(
            "--ray runs replicas of a model, not addresses; give an artifact or a checkpoint", "engine"
        )
    return kind


def engine_application(model: str, kind: EngineKind, engines: EngineOptions, options: RayOptions) -> Any:
    """Return the Serve application of the replicas, ready to be run or bound into another."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig

    from nearfar.fallback_server.ray_engine.replica import EngineReplica
    from nearfar.fallback_server.ray_engine.router import PrefixRouter

    scaling = AutoscalingConfig(
        min_replicas=options.min_replicas,
        max_replicas=options.max_replicas,
        initial_replicas=options.min_replicas,
        target_ongoing_requests=options.target,
        upscale_delay_s=options.upscale_delay,
        downscale_delay_s=options.downscale_delay,
    )
    made: Any = RequestRouterConfig  # the class's annotations are wrong for a type checker
    router = made(request_router_class=PrefixRouter, request_router_kwargs={"slack": options.slack})
    deployment: Any = serve.deployment(
        EngineReplica, name=ENGINE, autoscaling_config=scaling, request_router_config=router,
        max_ongoing_requests=options.max_ongoing, health_check_period_s=options.health_seconds,
        health_check_timeout_s=options.health_timeout, logging_config=QUIET,
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
    )  # fmt: skip
    return deployment.bind(model, kind, engines)


def _deploy(model: str, kind: EngineKind, engines: EngineOptions, options: RayOptions) -> Any:
    """Run the application and return its handle, which waits until every replica has loaded the model."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        from ray import serve
    except ModuleNotFoundError as error:
        raise RequestError(f"--ray needs {error.name}: pip install 'nearfar[ray]'") from error

    _connect(ray, options.address)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    # nearfar is the HTTP server. A Serve that runs already stays as it is.
    serve.start(proxy_location="Disabled", logging_config=QUIET)
    if options.app in serve.status().applications:
        raise RequestError(
            f"an application {options.app!r} runs on this cluster already; choose another --ray-app"
        )
    try:
        return serve.run(
            engine_application(model, kind, engines, options), name=options.app, route_prefix=None
        )
    except RuntimeError as error:
        _take_down(options)
        raise EngineError(f"the replicas do not start: {error}") from error


def _connect(ray: Any, address: str | None) -> None:
    """Join the cluster at `address`, or start one on this machine alone."""
    if address is not None:
        try:
            ray.init(address=address, logging_level=logging.WARNING)
        except ConnectionError as error:
            raise EngineError(f"there is no Ray cluster at {address}: {error}") from error
        return
    for attempt in range(STARTS):
        try:
            # the processes of Ray, the replicas among them, inherit the present environment
            with keys_hidden():
                ray.init(
                    include_dashboard=False, object_store_memory=OBJECT_STORE, logging_level=logging.WARNING
                )
            return
        except Exception as error:  # Ray raises a bare Exception when one of its processes is slow to start
            ray.shutdown()
            if attempt == STARTS - 1:
                raise EngineError(f"Ray does not start here: {error}") from error
            log.warning("Ray did not start (%s); it is tried again", error)


def _take_down(options: RayOptions) -> None:
    """Delete the replicas, and end a Ray that was started here."""
    ray: Any = import_module("ray")
    serve: Any = import_module("ray.serve")
    if ray.is_initialized():
        if options.address is None:
            serve.shutdown()
        else:
            serve.delete(options.app)
    ray.shutdown()
