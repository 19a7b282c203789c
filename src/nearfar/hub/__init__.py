"""Models of the Hugging Face hub: their names, and the download of their files into the hub's cache."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearfar.checkpoint_files import INDEX, indexed_files, weight_files
from nearfar.errors import CheckpointError
from nearfar.hub.reach import host, unreachable
from nearfar.hub.transfer import Fetched, Transfer
from nearfar.interruptible import interruptible
from nearfar.paths import absent, close_path, looks_like_path
from nearfar.room import lacking
from nearfar.store.known import KNOWN

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo

HUB_ID = re.compile(r"(?P<repository>\w[\w.-]*/[\w.-]+)(:(?P<wanted>[\w./ -]+))?")
"""A hub id: `owner/name`, or for a repository of GGUF files `owner/name:Q4_K_M`."""


# The client reads this variable when it is imported. nearfar reports failures itself.
os.environ.setdefault("HF_HUB_VERBOSITY", "critical")
OWN = 1 << 18
"""Files of at least this many bytes are downloaded by nearfar.hub.transfer, smaller ones by the hub's client.
"""

watched: ContextVar[Callable[[Fetched], None] | None] = ContextVar("watched", default=None)
"""Download progress callback, called from several threads; set by the CLI."""
waits: ContextVar[Callable[[str], AbstractContextManager[None]]] = ContextVar("waits")
"""Context that shows a wait for the hub; set by the CLI."""


def snapshot(repository: str, patterns: Sequence[str], stop: threading.Event | None = None) -> Path:
    """Download the files of a repository that match, as a directory in the hub's cache, whose disk must have
    room for them. Without a network, the files in the cache are used. Ctrl-C, or `stop`, ends it at once;
    received bytes are kept, and the next download continues there.

    Raises CheckpointError where there is no such repository, no room, or the download fails.
    """
    from httpx import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        DryRunError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    wanted, silent = list(patterns), _silent()
    try:
        if unreachable():
            return Path(snapshot_download(repository, allow_patterns=wanted, local_files_only=True))
        with contextlib.suppress(DryRunError):  # without a network, the cache's files are used
            files = interruptible(
                lambda: snapshot_download(repository, allow_patterns=wanted, dry_run=True, tqdm_class=silent),
                stop,
            )
            _check_room(repository, files)
            large = [file for file in files if file.will_download and (file.file_size or 0) >= OWN]
            Transfer(repository, _folder(repository), large, watched.get()).run(stop)
        return Path(
            interruptible(
                lambda: snapshot_download(repository, allow_patterns=wanted, tqdm_class=silent), stop
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, HTTPError, OSError) as error:
        raise failed(repository, error) from error


def names_of(repository: str, stop: threading.Event | None = None) -> list[str]:
    """The names of a repository's files; of its files in the cache where the hub cannot be reached. `stop`
    and errors are those of `snapshot`.
    """
    from httpx import HTTPError
    from huggingface_hub import CacheNotFound, HfApi, scan_cache_dir

    try:
        with _asking():
            if (reason := unreachable()) is not None:
                raise ConnectionError(reason)
            return interruptible(lambda: HfApi().list_repo_files(repository), stop)
    except (HTTPError, OSError) as error:  # the hub client raises its own errors and the system's
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
            raise failed(repository, error) from error
        return names


def weights_of(repository: str, names: Collection[str]) -> list[str]:
    """The safetensors files that hold a repository's weights, chosen by names: a repository may have the same
    weights twice.
    """
    index = text_of(repository, INDEX) if INDEX in names else None
    return weight_files(names, indexed_files(index) if index else ())


def text_of(repository: str, name: str) -> bytes | None:
    """Read one small file of a repository; None where it has no file of that name, or the hub's client is
    missing.

    Raises CheckpointError where the repository does not exist or may not be read, or where the hub cannot be
    reached and the cache has no file of it.
    """
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import (
            EntryNotFoundError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    except ModuleNotFoundError:  # the missing module is reported where more of the client is needed
        return None
    try:
        with _asking():
            silent, alone = _silent(), unreachable() is not None
            found = interruptible(
                lambda: hf_hub_download(repository, name, tqdm_class=silent, local_files_only=alone)
            )
        return Path(found).read_bytes()
    except LocalEntryNotFoundError as error:  # there is no network, or none that reaches the hub
        if cached(repository):
            return None
        raise failed(repository, error) from error
    except EntryNotFoundError:
        return None
    except RepositoryNotFoundError as error:  # the hub also raises this error without access rights
        raise failed(repository, error) from error
    except (ValueError, OSError):
        return None


def check_there(repository: str) -> None:
    """Raise CheckpointError where the hub cannot be reached and its cache has no file of the repository."""
    # the missing module is reported where more of the client is needed
    with contextlib.suppress(ModuleNotFoundError):
        with _asking():
            reason = unreachable()
        if reason is not None and not cached(repository):
            raise failed(repository)


def cached(repository: str) -> bool:
    """Whether the hub's cache has any file of a repository."""
    return any(_folder(repository).glob("snapshots/*/*"))


def no_path(given: str) -> str | None:
    """The message for a misspelt path; None for an existing path, or for a possible name. `owner/name` is a
    path where `owner` is a folder here, unless a short name stands for it, or it is in the hub's cache.
    """
    named = HUB_ID.fullmatch(given)
    if Path(given).expanduser().exists():
        return None
    if looks_like_path(given):
        return absent(given)
    if named is None or named["wanted"] is not None or not Path(given).parent.is_dir():
        return None
    if any(known.source == given for known in KNOWN.values()) or _is_cached(given):
        return None
    told = absent(given)
    return f"{told} (if {given} is a model of the hub, run this in another folder)" if told else None


def _is_cached(repository: str) -> bool:
    try:
        return cached(repository)
    except ModuleNotFoundError:
        return False


def _asking() -> AbstractContextManager[None]:
    """Context that shows a wait for the hub."""
    show = waits.get(None)
    return nullcontext() if show is None else show(f"asking {host()}")


def _silent() -> type[Any]:
    """A progress bar for the hub's client that shows nothing."""
    from tqdm import tqdm

    class Silent(tqdm):  # type: ignore[misc]  # it has no types
        def __init__(self, *args: Any, **keywords: Any) -> None:
            keywords.pop("name", None)
            super().__init__(*args, **{**keywords, "disable": True})

    return Silent


def _check_room(repository: str, files: Iterable[DryRunFileInfo]) -> None:
    folder = _folder(repository)
    cache, begun = folder.parent, folder.glob("blobs/*.incomplete")
    missing = sum(file.file_size or 0 for file in files if file.will_download)
    if lack := lacking(cache, missing - sum(file.stat().st_size for file in begun)):
        raise CheckpointError(
            f"the download of {repository} {lack}: free some space, or set HF_HOME to a folder on another "
            "disk"
        )


def _folder(repository: str) -> Path:
    """A repository's folder in the hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"


def failed(repository: str, error: Exception | None = None) -> CheckpointError:
    """The error for a repository that could not be downloaded."""
    from huggingface_hub.errors import RepositoryNotFoundError

    meant = close_path(repository)
    path = f"; did you mean the path {meant}?" if meant else ""
    if (reason := unreachable()) is not None:
        return CheckpointError(
            f"{reason}, and {repository} has not been downloaded before: check the network, or take a model "
            f"of the store (nearfar list){path}"
        )
    told = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, RepositoryNotFoundError):
        return CheckpointError(
            f"{host()} has no model {repository}, or it may not be read: check the name; if its licence has "
            f"to be accepted, accept it there and run `hf auth login`{path} ({told})"
        )
    return CheckpointError(
        f"the download of {repository} from {host()} failed ({told}): try again, the same command continues "
        f"the download{path}"
    )
