"""`nearfar serve`: OpenAI's interface over a model here, or over other servers."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from inspect import cleandoc
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nearfar.auto_models import auto_models
from nearfar.cli.models import Adapter, artifacts_of, named
from nearfar.cli.progress import Shown
from nearfar.edge_runtime.artifact.options import LoadOptions
from nearfar.edge_runtime.devices import device_choices, kv_bits_choices
from nearfar.errors import RequestError
from nearfar.fallback_server.engines.local import TextOptions
from nearfar.fallback_server.engines.opening import KINDS, EngineOptions, check_options, is_url
from nearfar.fallback_server.engines.upstream import KEY_VARIABLE, UpstreamOptions
from nearfar.fallback_server.engines.vllm import VllmOptions
from nearfar.fallback_server.http.limits import ServerLimits
from nearfar.fallback_server.http.prices import parse_prices
from nearfar.fallback_server.ray_engine.options import RayOptions, parse_replicas
from nearfar.fallback_server.serve import ServeOptions, check_access
from nearfar.fallback_server.serve import serve as run
from nearfar.store.serving import preferred, served

DEFAULTS = ServeOptions()
ENGINES, LIMITS = EngineOptions(), ServerLimits()
TEXT, UPSTREAM, VLLM, RAY = TextOptions(), UpstreamOptions(), VllmOptions(), RayOptions()
DEFAULT_REPLICAS = f"{RAY.min_replicas}:{RAY.max_replicas}"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

Model = Annotated[
    list[str],
    typer.Argument(
        help="What `nearfar run` takes: an artifact, a checkpoint, a hub id, a name (nearfar list), the URL "
        "of an artifact's manifest.json; or the URLs of OpenAI-compatible servers. A checkpoint in "
        "safetensors is served as it is where there is a CUDA GPU, through vLLM or PyTorch; others are built "
        "into the store where they are not there yet. With --engine artifact all are, and every URL is an "
        "artifact's.",
        show_default=False,
        autocompletion=named,
    ),
]


def _option(panel: str, name: str, text: str, variable: str | None = None) -> typer.models.OptionInfo:
    made: typer.models.OptionInfo = typer.Option(name, help=text, rich_help_panel=panel, envvar=variable)
    return made


def serve(
    model: Model,
    adapter: Adapter = None,
    engine: Annotated[
        str, _option("Engine", "--engine", "The engine: auto, torch, artifact, vllm or upstream.")
    ] = DEFAULTS.engine,
    name: Annotated[
        list[str] | None, _option("Engine", "--name", "A name of the model for clients; may be repeated.")
    ] = None,
    device: Annotated[
        str, _option("Engine", "--device", f"artifact: {device_choices()}. torch: cpu, cuda or auto.")
    ] = ENGINES.device,
    dtype: Annotated[
        str, _option("Engine", "--dtype", "torch: the dtype, such as auto, float32 or bfloat16.")
    ] = ENGINES.dtype,
    threads: Annotated[int | None, _option("Engine", "--threads", "CPU threads.")] = ENGINES.threads,
    kv_memory: Annotated[
        str | None, _option("Engine", "--kv-memory", "Memory for the KV cache, such as 512MB.")
    ] = ENGINES.kv_memory,
    kv_bits: Annotated[
        int | None,
        _option("Engine", "--kv-bits", f"artifact: bits of a value in the KV cache: {kv_bits_choices()}."),
    ] = ENGINES.kv_bits,
    program: Annotated[
        str | None,
        _option("Engine", "--program", "artifact: name of its program to run (nearfar inspect lists them)."),
    ] = ENGINES.program,
    trust: Annotated[
        bool,
        _option(
            "Engine",
            "--trust",
            "Run the native code of a CPU artifact that was not built here, now and from now on.",
        ),
    ] = ENGINES.trust,
    max_running: Annotated[
        int | None, _option("Engine", "--max-running", "torch: answers computed at once.")
    ] = ENGINES.max_running,
    reasoning: Annotated[
        str,
        _option(
            "Engine", "--reasoning", "How reasoning is found: auto, off, or the marks around it as BEGIN,END."
        ),
    ] = TEXT.reasoning,
    upstream_continues: Annotated[
        bool,
        _option(
            "Engine",
            "--upstream-continues",
            "The upstream servers support continue_final_message (vLLM, nearfar).",
        ),
    ] = UPSTREAM.continues,
    upstream_salts: Annotated[
        bool,
        _option(
            "Engine",
            "--upstream-salts/--no-upstream-salts",
            "The upstream servers support cache_salt (vLLM, SGLang, nearfar): each key has a prompt cache "
            "of its own there.",
        ),
    ] = UPSTREAM.salts,
    auto: Annotated[
        str | None,
        _option("Engine", "--auto", "upstream: SMALL,LARGE: the model name auto chooses between these."),
    ] = None,
    auto_policy: Annotated[
        Path | None,
        _option("Engine", "--auto-policy", "The routing policy for auto, as JSON (docs/routing.md)."),
    ] = None,
    vllm_command: Annotated[
        str, _option("Engine", "--vllm-command", "vllm: the program to start, also of another environment.")
    ] = VLLM.command,
    vllm_option: Annotated[
        list[str] | None,
        _option(
            "Engine",
            "--vllm-option",
            "vllm: an option for vLLM, such as --vllm-option=--max-model-len=8192; may be repeated.",
        ),
    ] = None,
    upstream_priorities: Annotated[
        bool,
        _option(
            "Engine",
            "--upstream-priorities",
            "The upstream servers take priority (vLLM with --scheduling-policy priority, nearfar): requests "
            "carry the priority of their key.",
        ),
    ] = UPSTREAM.priorities,
    ray: Annotated[bool, _option("Ray", "--ray", "Run replicas of the engine on Ray Serve.")] = DEFAULTS.ray
    is not None,
    replicas: Annotated[
        str, _option("Ray", "--replicas", "Number of replicas; MIN:MAX scales with the requests in progress.")
    ] = DEFAULT_REPLICAS,
    ray_address: Annotated[
        str | None,
        _option(
            "Ray",
            "--ray-address",
            "The address of an existing cluster, or auto. Default: Ray is started here.",
        ),
    ] = RAY.address,
    ray_app: Annotated[str, _option("Ray", "--ray-app", "The application's name on the cluster.")] = RAY.app,
    cpus_per_replica: Annotated[
        float, _option("Ray", "--cpus-per-replica", "CPUs reserved for each replica.")
    ] = RAY.cpus,
    gpus_per_replica: Annotated[
        float, _option("Ray", "--gpus-per-replica", "GPUs reserved for each replica.")
    ] = RAY.gpus,
    target_requests: Annotated[
        float, _option("Ray", "--target-requests", "Requests in progress in a replica at which scaling aims.")
    ] = RAY.target,
    host: Annotated[str, _option("Network", "--host", "The address to listen on.")] = DEFAULTS.host,
    port: Annotated[
        int,
        typer.Option(
            "--port",
            min=0,
            max=65535,
            help="The port to listen on; 0: any free one.",
            rich_help_panel="Network",
        ),
    ] = DEFAULTS.port,
    tls_cert: Annotated[Path | None, _option("Network", "--tls-cert", "A certificate, for https.")] = None,
    tls_key: Annotated[
        Path | None, _option("Network", "--tls-key", "The private key of the certificate.")
    ] = None,
    tls_client_ca: Annotated[
        Path | None,
        _option("Network", "--tls-client-ca", "Accept only clients with a certificate of this CA."),
    ] = None,
    cors: Annotated[
        list[str] | None,
        _option("Network", "--cors", "An origin whose pages may call the server; may be repeated."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        _option(
            "Network",
            "--allowed-host",
            "A host name for clients, besides this machine's own; may be repeated; '*': any name.",
        ),
    ] = None,
    keep_alive: Annotated[
        float,
        _option("Network", "--keep-alive", "Seconds after which a silent stream sends a comment; 0: never."),
    ] = LIMITS.keep_alive,
    drain: Annotated[
        float,
        _option("Network", "--drain", "Seconds that requests in progress have to finish after SIGTERM."),
    ] = DEFAULTS.drain,
    keys: Annotated[
        Path | None, _option("Access", "--keys", "The file of API keys; see `nearfar keys`.")
    ] = None,
    no_auth: Annotated[
        bool, _option("Access", "--no-auth", "Accept requests without a key, also from other machines.")
    ] = DEFAULTS.no_auth,
    audit: Annotated[
        Path | None, _option("Access", "--audit", "Append a record of each request to this file.")
    ] = None,
    audit_text: Annotated[
        bool, _option("Access", "--audit-text", "Include the text of prompts and answers in the records.")
    ] = DEFAULTS.audit_text,
    max_requests: Annotated[
        int, _option("Limits", "--max-requests", "The most requests in progress; further ones get 429.")
    ] = LIMITS.requests,
    max_tokens_under_way: Annotated[
        int,
        _option(
            "Limits",
            "--max-tokens-under-way",
            "The most tokens of the requests in progress: prompts, and answers that are kept until they are "
            "whole.",
        ),
    ] = LIMITS.tokens,
    fronts: Annotated[
        int,
        _option(
            "Limits",
            "--fronts",
            "The number of servers that share these keys: each grants its part of limits that are not "
            "counted together.",
        ),
    ] = LIMITS.fronts,
    limits_store: Annotated[
        str | None,
        _option(
            "Limits",
            "--limits-store",
            "redis://HOST:PORT/0: a store in which these servers together count the use of a key.",
            "NEARFAR_LIMITS_STORE",
        ),
    ] = DEFAULTS.limits_store,
    max_body: Annotated[
        int, _option("Limits", "--max-body", "The most bytes of a request.")
    ] = LIMITS.body_bytes,
    strict_fields: Annotated[
        bool,
        _option(
            "Limits",
            "--strict-fields",
            "Reject unknown fields of requests, also in front of other servers. Without this option they are "
            "passed on to these, or ignored, and named in the header x-nearfar-ignored and in the log.",
        ),
    ] = DEFAULTS.strict_fields,
    store: Annotated[
        bool,
        _option(
            "Limits",
            "--store/--no-store",
            "Keep the newest responses of /v1/responses in memory, for previous_response_id.",
        ),
    ] = DEFAULTS.store,
    price: Annotated[
        list[str] | None,
        _option(
            "Logs",
            "--price",
            "Prices of a million tokens, for the metrics, as MODEL=PROMPT,ANSWER[,CACHED]; '*' is any model; "
            "may be repeated.",
        ),
    ] = None,
    log_format: Annotated[
        str, _option("Logs", "--log-format", "The format of logs: text or json.")
    ] = DEFAULTS.log_format,
    log_level: Annotated[
        str, _option("Logs", "--log-level", "The least level of logs: debug, info, warning or error.")
    ] = DEFAULTS.log_level,
) -> None:
    """Serve a model to many clients at once, through OpenAI's interface.

    It listens while it loads: /ready says what it waits for. NEARFAR_READY=decode loads sooner, and compiles
    a GPU's kernels of a prompt's length when there is one.
    """
    if log_format not in ("text", "json"):
        raise RequestError(f"--log-format must be text or json, not {log_format!r}")
    chosen = next((kind for kind in KINDS if kind == engine), None)
    if chosen is None:
        raise RequestError(f"--engine must be one of {', '.join(KINDS)}, not {engine!r}")
    engines = replace(
        ENGINES,
        names=tuple(name or ()),
        device=device,
        dtype=dtype,
        threads=threads,
        kv_memory=kv_memory,
        kv_bits=kv_bits,
        program=program,
        trust=trust,
        max_running=max_running,
        vllm=replace(VLLM, command=vllm_command, arguments=tuple(vllm_option or ())),
        text=replace(TEXT, reasoning=reasoning),
        upstream=replace(
            UPSTREAM,
            continues=upstream_continues,
            salts=upstream_salts,
            priorities=upstream_priorities,
            auto=None if auto is None else auto_models(auto, auto_policy),
        ),
    )
    for option, count in (
        ("fronts", fronts),
        ("max-requests", max_requests),
        ("max-tokens-under-way", max_tokens_under_way),
        ("max-body", max_body),
    ):
        if count < 1:
            raise RequestError(f"--{option} must be at least 1, not {count}")
    for option, seconds in (("keep-alive", keep_alive), ("drain", drain)):
        if not seconds >= 0:
            raise RequestError(f"--{option} must be 0 or more seconds, not {seconds:g}")
    if log_level.upper() not in _LEVELS:
        raise RequestError(f"--log-level must be {', '.join(_LEVELS).lower()}, not {log_level!r:.80}")
    if audit_text and audit is None:
        raise RequestError("--audit-text needs --audit FILE, which says where to write")
    if not ray and replicas != DEFAULT_REPLICAS:
        raise RequestError(f"--replicas {replicas} needs --ray, which runs them")
    limits = replace(
        LIMITS,
        requests=max_requests,
        tokens=max_tokens_under_way,
        body_bytes=max_body,
        keep_alive=keep_alive,
        fronts=fronts,
    )
    low, high = parse_replicas(replicas)
    on_ray = replace(
        RAY,
        address=ray_address,
        app=ray_app,
        min_replicas=low,
        max_replicas=high,
        cpus=cpus_per_replica,
        gpus=gpus_per_replica,
        target=target_requests,
    )
    options = ServeOptions(
        engine=chosen,
        host=host,
        port=port,
        keys=keys,
        no_auth=no_auth,
        drain=drain,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_client_ca=tls_client_ca,
        cors=tuple(cors or ()),
        hosts=tuple(allowed_host or ()),
        audit=audit,
        audit_text=audit_text,
        log_format="json" if log_format == "json" else "text",
        log_level=log_level,
        limits=limits,
        limits_store=limits_store,
        strict_fields=strict_fields,
        store=store,
        prices=parse_prices(price or ()),
        engines=engines,
        ray=on_ray if ray else None,
    )
    if auto_policy is not None and auto is None:
        raise RequestError("--auto-policy goes with --auto SMALL,LARGE")
    log = logging.getLogger("nearfar.serve")
    shown = Shown(Console(stderr=True), lambda text: log.info("waiting for the model: %s", text))
    LoadOptions(threads=threads, kv_memory=kv_memory)
    check_access(options)  # access options are also checked before anything is built or fetched
    if chosen != "auto" or not is_url(model):  # one address may be an artifact's, which is seen later
        check_options(chosen, engines)
    if adapter is not None and len(model) > 1:
        raise RequestError("--adapter is merged into one model: give one, and a server of its own for others")
    found = model
    if len(model) == 1:
        built = partial(artifacts_of, device=device, adapter=adapter)
        found = [served(model[0], chosen, built, preferred(vllm_command), adapter)]
    run(tuple(found), options, shown)


serve.__doc__ = (
    f"{cleandoc(serve.__doc__ or '')}\n\nThe key for upstream servers is read from {KEY_VARIABLE}."
)
