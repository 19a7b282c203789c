"""Opens the engine for what the user names: an artifact, a checkpoint, or the addresses of other servers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from nearfar.checkpoint_files import ADAPTER
from nearfar.edge_runtime.artifact.finder import holds_artifacts
from nearfar.edge_runtime.progress import Tell, Teller
from nearfar.edge_runtime.text.codec import check_templates
from nearfar.edge_runtime.text.files import TEMPLATE_FILES
from nearfar.errors import CheckpointError, RequestError
from nearfar.fallback_server.backend import GRAMMAR_SECONDS, Backend
from nearfar.fallback_server.engines.base import ServerEngine
from nearfar.fallback_server.engines.local import LocalEngine, TextOptions, TextSource
from nearfar.fallback_server.engines.upstream import UpstreamEngine, UpstreamOptions
from nearfar.fallback_server.engines.vllm import COMMAND, VllmEngine, VllmOptions, vllm_is_there
from nearfar.fallback_server.torch_engine.options import require_checkpoint, require_system
from nearfar.format.manifest import Model
from nearfar.hub import names_of, snapshot, watched, weights_of
from nearfar.pooling import MODULES, pooling_of

EngineKind = Literal["auto", "torch", "artifact", "vllm", "upstream"]
KINDS: tuple[EngineKind, ...] = ("auto", "torch", "artifact", "vllm", "upstream")
CHECKPOINT_FILES = ("*.json", "*.jinja", "*.model")
"""Files of a hub repository that the torch engine reads in addition to the weights: transformers may read any
of its settings.
"""
LOOKED_AT = ("config.json", ADAPTER, "tokenizer_config.json", *TEMPLATE_FILES, MODULES, "*/config.json")
"""Files that are checked before anything else is fetched or loaded."""


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is opened. `names`: the names that clients use for the model; by default its own.

    `device`, `threads`, `kv_memory` (bytes, or a size like "512MB") apply to local engines, `dtype` and
    `max_running` to torch, `program` (a name) and `kv_bits` (of the KV cache) to artifacts. None means a
    default that suits the machine and the model. `trust`: run the native code of an artifact that was not
    built here.
    """

    names: tuple[str, ...] = ()
    device: str = "auto"
    threads: int | None = None
    kv_memory: str | None = None
    kv_bits: int | None = None
    program: str | None = None
    trust: bool = False
    dtype: str = "auto"
    max_running: int | None = None
    max_waiting: int = 256
    grammar_timeout: float = GRAMMAR_SECONDS
    text: TextOptions = field(default_factory=TextOptions)
    upstream: UpstreamOptions = field(default_factory=UpstreamOptions)
    vllm: VllmOptions = field(default_factory=VllmOptions)


def is_url(models: Seq[str]) -> bool:
    """Whether all models are addresses of servers."""
    return all(model.startswith(("http://", "https://")) for model in models)


def guess(models: Seq[str], command: str = COMMAND) -> EngineKind:
    """Infer the kind of engine from the models' names. Raises RequestError for a mix, or for several that are
    not URLs.
    """
    if is_url(models):
        return "upstream"
    if len(models) > 1 or any(is_url((model,)) for model in models):
        raise RequestError(
            f"MODEL is one directory or hub id, or one or several URLs, not {' '.join(models)}"
        )
    if holds_artifacts(Path(models[0])):
        return "artifact"
    return "vllm" if vllm_is_there(command) else "torch"


def kind_of(models: Seq[str], kind: EngineKind, options: EngineOptions) -> EngineKind:
    """Return the kind of engine that serves the models. Raises RequestError where the models or the options
    do not fit it; nothing is loaded.
    """
    if kind not in KINDS:
        raise RequestError(f"engine must be one of {', '.join(KINDS)}, not {kind!r}", "engine")
    kind = guess(models, options.vllm.command) if kind == "auto" else kind
    check_options(kind, options)
    if kind != "upstream" and len(models) != 1:
        raise RequestError(f"the engine {kind} serves one model, not {len(models)}")
    return kind


async def open_engine(
    models: Seq[str], kind: EngineKind, options: EngineOptions, tell: Tell | None = None
) -> ServerEngine:
    """Load a model, or connect to where it runs. `tell` receives the progress."""
    telling = Teller(tell)
    kind = kind_of(models, kind, options)
    if kind == "upstream":
        return await UpstreamEngine.connect(models, options.upstream, options.names)
    place = models[0]
    if kind == "vllm":
        return await VllmEngine.open(place, options.vllm, options.upstream, options.names, telling)
    if kind == "torch":
        require_system()
        if Path(place).is_dir():
            _check(Path(place))
        else:
            place = str(await _download(place, telling))
    source = text_source(place, kind, options)
    telling("starting")
    backend = await open_backend(source, options, tell)
    telling("starting")
    engine = LocalEngine(backend, source, options.text, options.names, here=True)
    await engine.start()
    return engine


def _check(checkpoint: Path) -> None:
    """Check a checkpoint's settings. Raises CheckpointError or ArtifactError where they rule out serving
    it.
    """
    require_checkpoint(checkpoint)
    check_templates(checkpoint)
    pooling_of(checkpoint)


async def _download(repository: str, telling: Teller) -> Path:
    telling("downloading")
    stop = threading.Event()
    watched.set(lambda progress: telling("downloading", progress.all_done, progress.all_total))
    try:
        _check(await asyncio.to_thread(snapshot, repository, LOOKED_AT, stop))
        return await asyncio.to_thread(_fetched, repository, stop)
    finally:  # a server that is asked to end does not wait for the opening
        stop.set()


@dataclass(frozen=True, kw_only=True)
class ArtifactSource(TextSource):
    """An artifact as a text source: its path, and the model facts of its manifest."""

    path: Path
    model: Model


def text_source(model: str, kind: EngineKind, options: EngineOptions) -> TextSource:
    """Return the model facts that the text side needs, without loading the model."""
    if kind == "artifact":
        from nearfar.edge_runtime.artifact.loading import choose

        artifact, _ = choose(Path(model), options.device)
        directory = (artifact.path / (artifact.tokenizer_file("tokenizer.json") or "")).parent
        facts, answers = artifact.manifest.model, artifact.manifest.answers
        return ArtifactSource(directory, facts.bos_token_id, answers, path=Path(model), model=facts)
    path = Path(model) if Path(model).is_dir() else _fetched(model)
    return TextSource(path, _bos(path), pooling=pooling_of(path))


async def open_backend(source: TextSource, options: EngineOptions, tell: Tell | None = None) -> Backend:
    """Load an artifact, or a checkpoint with PyTorch, as a token backend."""
    if isinstance(source, ArtifactSource):
        return await _artifact(source, options, tell)
    check_options("torch", options)
    return await _torch(source.directory, options)


def check_options(kind: EngineKind, options: EngineOptions) -> None:
    """Raise RequestError where options belong to another kind of engine. "auto": a kind that is not known
    yet, but computes here.
    """
    if kind != "upstream":
        _check_upstream(kind, options.upstream)
    else:
        _check_local(options)
    if kind == "upstream" and options.names and options.upstream.auto is not None:
        raise RequestError(
            f"--name {options.names[0]} serves one model, and --auto stands for two: leave out one of these "
            "options",
            "names",
        )
    if kind != "auto":
        _check_program(kind, options)


def _check_upstream(kind: EngineKind, given: UpstreamOptions) -> None:
    """Raise RequestError for the first option that changes nothing without other servers."""
    default, said = UpstreamOptions(), "there are none" if kind == "auto" else f"the engine is {kind}"
    for name, option, what in (
        ("auto", "--auto", "chooses between models of other servers"),
        ("continues", "--upstream-continues", "says what other servers support"),
        ("salts", "--no-upstream-salts", "says what other servers reject"),
        ("priorities", "--upstream-priorities", "says what other servers take"),
    ):
        if getattr(given, name) != getattr(default, name):
            raise RequestError(
                f"{option} {what}, but {said}: leave it out, or give the addresses of servers (nearfar serve "
                "http://…)",
                name,
            )


def _check_local(options: EngineOptions) -> None:
    """Raise RequestError for the first option that changes nothing where other servers compute."""
    default = EngineOptions()
    for name, option in (
        ("device", "--device"),
        ("dtype", "--dtype"),
        ("threads", "--threads"),
        ("kv_memory", "--kv-memory"),
        ("max_running", "--max-running"),
        ("trust", "--trust"),
        ("vllm", "--vllm-command or --vllm-option"),
        ("text", "--reasoning"),
    ):
        if getattr(options, name) != getattr(default, name):
            raise RequestError(
                f"{option} changes nothing where other servers compute: leave it out, or give it to the "
                "server that computes the model",
                name,
            )


def _check_program(kind: EngineKind, options: EngineOptions) -> None:
    if options.program is not None and kind != "artifact":
        raise RequestError(
            f"program (--program) names one of an artifact's, but the engine is {kind}: leave it out, or "
            "serve an artifact",
            "program",
        )
    if options.kv_bits is not None and kind != "artifact":
        raise RequestError(
            f"kv_bits (--kv-bits) is of an artifact's KV cache, but the engine is {kind}: leave it out, or "
            "serve an artifact",
            "kv_bits",
        )


async def _artifact(source: ArtifactSource, options: EngineOptions, tell: Tell | None) -> Backend:
    from nearfar.edge_runtime import AsyncEngine
    from nearfar.fallback_server.engines.artifact import ArtifactBackend
    from nearfar.fallback_server.grammars import GrammarService

    # The service is started while the engine loads: the compiler and the vocabulary take longer than a small
    # model's weights.
    grammars = GrammarService(
        source.directory,
        source.model.vocab_size,
        tuple(source.model.eos_token_ids),
        source.answers,
        timeout=options.grammar_timeout,
    )
    grammars.start(here=True)
    try:
        edge = await AsyncEngine.load(
            source.path,
            progress=tell,
            device=options.device,
            threads=options.threads,
            kv_memory=options.kv_memory,
            kv_bits=options.kv_bits,
            program=options.program,
            trust=options.trust,
        )
    except BaseException:
        await grammars.close()
        raise
    return ArtifactBackend(edge.core, grammars, max_waiting=options.max_waiting)


async def _torch(checkpoint: Path, options: EngineOptions) -> Backend:
    from nearfar.edge_runtime.artifact.budget import parse_size

    try:
        client: Any = await asyncio.to_thread(import_module, "nearfar.fallback_server.torch_engine.client")
        chosen: Any = import_module("nearfar.fallback_server.torch_engine.options")
    except ModuleNotFoundError as error:
        raise RequestError(f"--engine torch needs {error.name}: pip install 'nearfar[server]'") from error
    given = {
        "device": options.device,
        "dtype": options.dtype,
        "threads": options.threads,
        "max_waiting": options.max_waiting,
        "max_running": options.max_running,
        "grammar_seconds": options.grammar_timeout,
        "cache_bytes": parse_size(options.kv_memory) if options.kv_memory else None,
    }
    settings = chosen.TorchOptions(**{name: value for name, value in given.items() if value is not None})
    backend: Backend = await client.TorchBackend.load(checkpoint, settings)
    return backend


def _fetched(repository: str, stop: threading.Event | None = None) -> Path:
    """Fetch a repository's checkpoint and return its directory in the hub's cache."""
    weights = weights_of(repository, names_of(repository, stop))
    return snapshot(repository, (*weights, *CHECKPOINT_FILES), stop)


def _bos(path: Path) -> int | None:
    """The token that begins a text, from the checkpoint's config; None where it names none."""
    try:
        value = json.loads((path / "config.json").read_text(encoding="utf-8")).get("bos_token_id")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}/config.json cannot be read: {error}") from error
    return value if isinstance(value, int) else None
