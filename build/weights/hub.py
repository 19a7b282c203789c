"""Checkpoints of the Hugging Face hub, in its own cache, which downloads go on in where they ended.

A repository of GGUF files alone holds one model many times, quantized in different ways. Which one is wanted
is said behind a colon, as for llama.cpp and Ollama: `owner/name:Q4_K_M`, or a file's own name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from nearfar.build.weights.checkpoint import CONFIG_FILES, INDEX, TOKENIZER_FILES
from nearfar.build.weights.gguf.container import stem_of
from nearfar.build.weights.mlc_directory import MLC_FILES
from nearfar.errors import CheckpointError
from nearfar.hub_ids import HUB_ID
from nearfar.room import lacking

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo

PATTERNS = (
    "*.safetensors",
    INDEX,
    *CONFIG_FILES,
    *TOKENIZER_FILES,
    "special_tokens_map.json",
    "modules.json",
    "config_sentence_transformers.json",
    "*_Pooling/config.json",
    "LICENSE*",
    *MLC_FILES,
)
USUAL = ("Q4_K_M", "Q4_0", "Q8_0")
"""Of a repository's GGUF models, what is taken where nothing is said: the first of these that it has."""
NO_MODEL = ("mmproj", "imatrix")
"""How files begin, or end, that are GGUF and no language model: parts for pictures, importances."""


def download(source: str) -> Path:
    """A hub repository's files that a build reads, as a directory in the hub's cache; of one of GGUF files,
    the file, or the first of its parts. Without a network, what is in the cache.

    Raises CheckpointError where the name is no hub id, the download fails, or which file is meant is not
    clear.
    """
    named = HUB_ID.fullmatch(source)
    if named is None:
        raise CheckpointError(
            f"{source}: no such directory, and not a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct or "
            "owner/name-GGUF:Q4_K_M: check the path"
        )
    repository, wanted = named["repository"], named["wanted"]
    if wanted is None:
        folder = _snapshot(repository, PATTERNS)
        if any(any(folder.glob(pattern)) for pattern in ("*.safetensors", *MLC_FILES)):
            return folder
    models = _models(_names(repository))
    if not models and wanted is None:
        return folder  # what it lacks is told by who opens it
    files = choose(repository, models, wanted)
    return _snapshot(repository, files) / files[0]


def choose(repository: str, models: Mapping[str, Sequence[str]], wanted: str | None) -> Sequence[str]:
    """The files of the model that is wanted, of those that there are by name; CheckpointError where none or
    several could be meant.
    """
    listed = ", ".join(sorted(PurePosixPath(name).name for name in models))
    if wanted is None:
        found = list(models) if len(models) == 1 else []
        for usual in USUAL:
            found = found or [name for name in models if _is_called(name, usual)]
        advice = f"say which one, as {repository}:Q4_K_M"
    else:
        found = [name for name in models if _is_called(name, wanted)]
        advice = "say more of its name" if found else "say one of these"
    if len(found) == 1:
        return models[found[0]]
    meant = f"{repository}:{wanted}" if wanted is not None else repository
    what = "could be several of" if found else "is none of" if wanted is not None else "has"
    raise CheckpointError(f"{meant} {what} the GGUF models {listed or '(there are none)'}: {advice}")


def _is_called(name: str, wanted: str) -> bool:
    """Whether a model is the file that is wanted, or has it as a word at its end: its quantization."""
    name, wanted = name.lower(), wanted.lower().removesuffix(".gguf")
    return name == wanted or PurePosixPath(name).name == wanted or name.endswith((f"-{wanted}", f".{wanted}"))


def _models(files: Iterable[str]) -> dict[str, list[str]]:
    """GGUF models by their files' names without parts and suffix, and the parts of each, in order."""
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        path = PurePosixPath(file)
        if path.suffix != ".gguf" or path.stem.startswith(NO_MODEL) or path.stem.endswith(NO_MODEL):
            continue
        models.setdefault(str(path.with_name(stem_of(path.name))), []).append(file)
    return models


def _names(repository: str) -> list[str]:
    """The names of a repository's files; of those in the cache, where the hub cannot be reached."""
    from httpx import HTTPError
    from huggingface_hub import CacheNotFound, HfApi, scan_cache_dir

    try:
        return HfApi().list_repo_files(repository)
    except (HTTPError, OSError) as error:  # the hub's own errors are both
        try:
            kept = [repo.refs.get("main") for repo in scan_cache_dir().repos if repo.repo_id == repository]
        except CacheNotFound:
            kept = []
        names = [
            file.file_path.relative_to(revision.snapshot_path).as_posix()
            for revision in kept
            if revision is not None
            for file in revision.files
        ]
        if not names:
            raise _failed(repository, error) from error
        return names


def _snapshot(repository: str, patterns: Sequence[str]) -> Path:
    """The files of a repository that match, in the cache, which must have room for what it lacks of them."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        DryRunError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    wanted = list(patterns)
    try:
        with contextlib.suppress(DryRunError):  # without a network, what there is will do
            _check_room(repository, snapshot_download(repository, allow_patterns=wanted, dry_run=True))
        return Path(snapshot_download(repository, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise _failed(repository, error) from error


def _check_room(repository: str, files: Iterable[DryRunFileInfo]) -> None:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    begun = (cache / f"models--{repository.replace('/', '--')}").glob("blobs/*.incomplete")
    missing = sum(file.file_size or 0 for file in files if file.will_download)
    if lack := lacking(cache, missing - sum(file.stat().st_size for file in begun)):
        raise CheckpointError(
            f"the download of {repository} {lack}: free some space, or let HF_HOME name a folder on another "
            "disk"
        )


def _failed(repository: str, error: Exception) -> CheckpointError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return CheckpointError(
        f"{repository}: no such directory, and the download from the hub failed ({reason}): check the name, "
        "the network, and `hf auth login` for gated models"
    )
