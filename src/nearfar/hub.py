"""Models of the Hugging Face hub: how they are named, and how their files come into its cache."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearfar.errors import CheckpointError
from nearfar.hub_transfer import Fetched, Transfer
from nearfar.interruptible import interruptible
from nearfar.room import lacking

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo

HUB_ID = re.compile(r"(?P<repository>\w[\w.-]*/[\w.-]+)(:(?P<wanted>[\w./ -]+))?")
"""`owner/name`; of a repository of GGUF files `owner/name:Q4_K_M`."""


os.environ.setdefault("HF_HUB_VERBOSITY", "critical")  # read where the client is imported: we tell what fails
OWN = 1 << 18
"""Bytes from which on a file is fetched by nearfar.hub_transfer; smaller ones come by the client."""

watched: ContextVar[Callable[[Fetched], None] | None] = ContextVar("watched", default=None)
"""Is told how far downloads are, from several threads; set by who shows it."""


def snapshot(repository: str, patterns: Sequence[str], stop: threading.Event | None = None) -> Path:
    """The files of a repository that match, as a directory in the hub's cache, which must have room for what
    it lacks of them. Without a network, what is in the cache. Ctrl-C, or `stop`, ends it at once; what has
    arrived stays, and the next download goes on there.

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
        with contextlib.suppress(DryRunError):  # without a network, what there is will do
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


def text_of(repository: str, name: str) -> bytes | None:
    """One small file of a repository; None where it has none of that name, or nothing can be asked.

    CheckpointError where there is no such repository, or it may not be read.
    """
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError
    except ModuleNotFoundError:  # told by who needs more of it
        return None
    try:
        silent = _silent()
        found = interruptible(lambda: hf_hub_download(repository, name, tqdm_class=silent))
        return Path(found).read_bytes()
    except EntryNotFoundError:  # also of what is not in the cache, where there is no network
        return None
    except RepositoryNotFoundError as error:  # also of what may not be read
        raise failed(repository, error) from error
    except (ValueError, OSError):
        return None


def _silent() -> type[Any]:
    """A bar of the hub's client that shows nothing."""
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
            f"the download of {repository} {lack}: free some space, or let HF_HOME name a folder on another "
            "disk"
        )


def _folder(repository: str) -> Path:
    """A repository's in the hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"


def failed(repository: str, error: Exception) -> CheckpointError:
    """What is said of a download that failed."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return CheckpointError(
        f"{repository}: no such directory, and the download from the hub failed ({reason}): check the name, "
        "the network, and `hf auth login` for gated models; what has arrived is kept"
    )
