"""Prints the requirements of an extra of pyproject.toml, one an argument of pip, without nearfar itself.

python scripts/extra.py clients
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def main(name: str) -> None:
    """Print the requirements."""
    extras = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    print(" ".join(extras[name]))


if __name__ == "__main__":
    main(sys.argv[1])
