"""Paths of the repository and of Node."""

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WEB = ROOT / "web"


def node() -> str:
    """The Node executable; the calling test is skipped where it or the web packages are missing."""
    found = shutil.which("node")
    if found is None:
        pytest.skip("node is not installed")
    if not (WEB / "node_modules" / "esbuild").is_dir():
        pytest.skip("web/node_modules is missing (run `make setup`)")
    return found
