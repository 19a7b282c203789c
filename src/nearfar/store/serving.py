"""Resolves a name on the command line of `nearfar serve`: the names of `nearfar run`, and also checkpoints
for PyTorch and URLs of other servers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from nearfar.build.adapters import adapter_at
from nearfar.build.first_look import config_at, first_look
from nearfar.checkpoint_files import ADAPTER
from nearfar.edge_runtime.artifact.finder import MANIFEST, holds_artifacts
from nearfar.errors import CheckpointError, StoreError
from nearfar.fallback_server.engines.vllm import CARD, vllm_is_there
from nearfar.hub import HUB_ID, check_there
from nearfar.step.causal import not_causal
from nearfar.step.kinds import check_writes_text, config_in, torch_refuses
from nearfar.store.entries import Store
from nearfar.store.fetching import address_of, is_url
from nearfar.store.naming import wanted_of

Preferred = Literal["vllm", "torch", "artifact"]

QUANTIZED = ("quantization", "quantization_config", "compression_config")
"""Keys of a config.json with quantized weights: of MLX, of transformers, of compressed-tensors' first
versions. A build keeps the codes; transformers needs a library for each kind, and a GPU for most.
"""


class Artifacts(Protocol):
    """Finds the folder of a model's artifacts, which it builds or downloads if necessary. `looked`:
    `first_look` has accepted the checkpoint already.
    """

    def __call__(self, given: str, /, *, looked: bool = False) -> Path: ...


def served(
    given: str,
    engine: str,
    artifacts: Artifacts,
    prefers: Preferred = "artifact",
    adapter: str | None = None,
) -> str:
    """The path, hub id or URL that an engine opens. `adapter`: the LoRA adapter that the build merges; no
    other engine than that of artifacts opens a model with one. Raises StoreError for an unknown name.

    With `engine` auto, a model of the store is served as an artifact, and so are checkpoints that
    transformers does not read (GGUF, MLX, MLC, quantized weights), or that PyTorch does not compute here
    (Gemma 2's attention). Any other checkpoint is for the engine that this machine `prefers`: it is served
    as it is by vLLM, or by PyTorch if that is installed, or built. What cannot be built is for PyTorch.
    """
    if adapter is not None and engine not in ("auto", "artifact"):
        raise StoreError(
            f"--adapter {adapter} is merged by a build, and --engine {engine} opens {given} as it is: leave "
            "--engine out"
        )
    if adapter is not None:
        return str(artifacts(given))
    if engine in ("upstream", "vllm"):  # vLLM itself says what it cannot read
        return given
    if engine == "torch":
        return _checkpoint(given)
    if is_url(given):
        fetched = engine == "artifact" or given.endswith(f"/{MANIFEST}") or Store().find(address_of(given))
        return str(artifacts(given)) if fetched else given
    if engine == "artifact":
        return str(artifacts(given))
    path = Path(given).expanduser()
    if path.exists() and holds_artifacts(path):
        return str(path)
    as_it_is = _opens_as_it_is(given, path, prefers)
    builds = as_it_is and prefers == "artifact" and _builds(given)
    if builds or not as_it_is:
        return str(artifacts(given, looked=builds))
    return str(path) if path.exists() else given


def preferred(command: str) -> Preferred:
    """The engine that suits this machine best: vLLM (`command` is its program) or PyTorch where there is a
    GPU with CUDA, an artifact elsewhere.
    """
    if not CARD.exists():
        return "artifact"
    return "vllm" if vllm_is_there(command) else "torch"


def _opens_as_it_is(given: str, path: Path, prefers: Preferred) -> bool:
    """Whether vLLM, if this machine `prefers` it, or PyTorch opens a checkpoint as it is. Raises
    CheckpointError for one that writes no text, before a server listens for it.
    """
    if path.exists():
        fits = _by_vllm(path) if prefers == "vllm" else _for_transformers(path)
        if fits:
            _writes_text(str(path))
        return fits
    store = Store()
    wanted = wanted_of(given, store)
    built = wanted.source != given or wanted.quant is not None or store.of(wanted) is not None
    if built or not _repository(given):
        return False
    if prefers == "vllm":
        _writes_text(given)
        return True
    return _torch_is_there() and _torch_runs(given)


def _builds(given: str) -> bool:
    """Whether a checkpoint can be built here, as far as its small files say."""
    if find_spec("tvm") is None:
        return False
    try:
        first_look(given)
    except CheckpointError:
        return False
    return True


def _by_vllm(path: Path) -> bool:
    """Whether a path is a checkpoint that vLLM reads, quantized or not; MLX's codes are not for it."""
    config = config_in(path)
    return config is not None and any(path.glob("*.safetensors")) and "quantization" not in config


def _writes_text(source: str) -> Mapping[str, Any]:
    """The config of a checkpoint. Raises CheckpointError for a model that writes no text."""
    config = config_at(source) or {}
    check_writes_text(config, source)
    return config


def _checkpoint(given: str) -> str:
    """The checkpoint behind a name, for PyTorch."""
    if is_url(given):
        raise StoreError(
            f"{given} is the address of artifacts or of a server: --engine torch takes a checkpoint, "
            "--engine artifact or upstream takes this"
        )
    path = Path(given).expanduser()
    source = str(path) if path.exists() else wanted_of(given, Store()).source
    readable = _for_transformers(Path(source), codes=True) if Path(source).exists() else _repository(source)
    if is_url(source) or not readable:
        raise StoreError(
            "--engine torch reads a directory with config.json and safetensors, or such a repository of the "
            f"hub, and {given} is {source if source != given else 'neither'}: leave --engine torch out, and "
            "nearfar builds it"
        )
    if Path(source).exists():  # a checkpoint of the hub is checked when it is downloaded
        _writes_text(source)
    else:
        check_there(source)
    return source


def _for_transformers(path: Path, codes: bool = False) -> bool:
    """Whether a path is a checkpoint in transformers' format; `codes`: quantized weights count, too."""
    if not any(path.glob("*.safetensors")):
        return False
    config = config_in(path)
    if config is None and (path / ADAPTER).is_file():
        return False  # an adapter is merged into its model by a build
    if config is None:
        return True  # opening the folder reports what is wrong
    quantized = any(config.get(key) for key in QUANTIZED)
    return (codes or (not quantized and _torch_answers(config))) and _torch_is_there()


def _torch_runs(repository: str) -> bool:
    """Whether the torch engine can run a model of the hub; not an adapter, which a build merges."""
    config = _writes_text(repository)
    return _torch_answers(config) and (bool(config) or adapter_at(repository) is None)


def _torch_answers(config: Mapping[str, Any]) -> bool:
    """Whether the torch engine can run the model of a config.json, as far as that says."""
    return torch_refuses(config) is None and not_causal(config) is None


def _repository(source: str) -> bool:
    """Whether a source is a hub repository whose name does not say that it has GGUF files alone."""
    named = HUB_ID.fullmatch(source)
    return named is not None and named["wanted"] is None and not source.lower().endswith("-gguf")


def _torch_is_there() -> bool:
    """Whether the torch engine runs here: see nearfar.fallback_server.torch_engine.options.require_system."""
    return sys.platform != "win32" and find_spec("torch") is not None
