"""Settings of the torch engine. The command line and the server take their defaults from here."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nearfar.checkpoint_files import check_no_adapter
from nearfar.errors import CheckpointError, DeviceError
from nearfar.fallback_server.backend import GRAMMAR_SECONDS
from nearfar.step.causal import not_causal
from nearfar.step.kinds import CONFIG, check_writes_text, config_in, torch_refuses

DType = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class TorchOptions:
    """How a model is loaded, how much it may hold, and how its process is watched. Times are in seconds.

    None means a value chosen for the device when the model is loaded (`model.py`, `cache.py`).
    """

    name: str | None = None  # what the model is called; the folder's name by default
    device: str = "auto"  # "auto": CUDA if there is a CUDA device
    dtype: DType = "auto"
    threads: int | None = None  # threads of the CPU; None: torch's default, within the quota
    page_size: int = 16  # in tokens
    cache_bytes: int | None = None
    context_length: int | None = None  # in tokens; at most the model's own
    max_running: int = 64  # sequences in one step
    token_budget: int | None = None  # token rows in one step, decode and prefill together
    max_waiting: int = 1024  # requests that may wait; any more get OverloadError
    ageing: float = 10.0  # seconds of waiting that are worth one step of priority
    native: bool = True  # on a CPU, compile the decode kernel if there is a C++ compiler
    cuda_graphs: bool = True
    grammar_seconds: float = GRAMMAR_SECONDS  # the most seconds of processor time to compile one grammar
    grammar_chars: int = 65_536  # the most characters of a grammar's text
    start_seconds: float = 600.0  # seconds until a started worker must be ready
    # seconds without progress, while there is work, after which a worker counts as hanging
    hang_seconds: float = 5.0
    # seconds: the most age of a step that proves life, and the most time of a probe
    alive_seconds: float = 5.0
    max_resubmits: int = 2  # engine deaths that a request may be part of before it is given up
    backoff_first: float = 0.1  # seconds before the first restart; doubled after each failed restart
    backoff_last: float = 10.0


def require_system() -> None:
    """Raise DeviceError on a system where the engine cannot run, before anything is downloaded or loaded for
    it.
    """
    if sys.platform == "win32":
        raise DeviceError(
            "the torch engine hands its process an open socket, which Windows cannot: serve an artifact "
            "(--engine artifact builds one of the same model), or serve from Linux, as in WSL"
        )


def require_checkpoint(path: Path) -> None:
    """Check, before anything heavy is loaded, that a folder is a checkpoint of a model that writes text.
    Raises CheckpointError for other folders and for adapters.
    """
    check_no_adapter(path, str(path))
    if not (path / CONFIG).is_file():
        raise CheckpointError(f"{path} is not a Hugging Face checkpoint: it has no {CONFIG}")
    config = config_in(path)
    if config is None:
        return  # transformers reports what is wrong with it
    check_writes_text(config, str(path))
    if why := torch_refuses(config):
        raise CheckpointError(
            f"{path}: config.json: PyTorch is not used for this model, for {why}: leave --engine torch out, "
            "and nearfar builds it if it can"
        )
    if what := not_causal(config):
        raise CheckpointError(f"{path}: config.json: {what}")
