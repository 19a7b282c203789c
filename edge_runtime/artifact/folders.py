"""Where this user's files of nearfar lie: what may be deleted at any time, and what may not."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """For what can be made again."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "nearfar"
    return _local("XDG_CACHE_HOME", ".cache")


def data_folder() -> Path:
    """For what is to stay."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "nearfar"
    return _local("XDG_DATA_HOME", ".local/share")


def _local(variable: str, below_home: str) -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "nearfar"
    return Path(os.environ.get(variable) or Path.home() / below_home) / "nearfar"
