"""Finds the shared data beside the project; tests that need missing data are skipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def shared_data(*parts: str) -> Path:
    """Path of a shared file or folder, e.g. shared_data("models", "stories260K"); skips the test if it does
    not exist.
    """
    root = Path(os.environ.get("NEARFAR_SHARED", Path(__file__).parents[2] / "shared" / "data"))
    path = root.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"needs {path}, which is not there (set NEARFAR_SHARED to the shared data folder)")
    return path
