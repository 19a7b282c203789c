"""What is imported for what: in a process of its own, with the heavy libraries made impossible to import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared_data import shared_data
from tests.support import tiny

BARRED = """
import sys

class Barred:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BARRED:
            raise AssertionError(f"imported {name}")

BARRED = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Barred())
"""
RUNTIME = "tvm,tvm_ffi,torch,tokenizers,jinja2,wgpu,vulkan,mlx,transformers"


def run(barred: str, code: str, *arguments: object) -> None:
    """Run code in a process where none of `barred` can be imported."""
    command = [sys.executable, "-c", BARRED + code, barred, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "import nearfar",
        "from nearfar.edge_runtime.cache import SequenceTable",
        "from nearfar.edge_runtime.engine import scheduler",
        "from nearfar.edge_runtime.artifact.reader import Artifact",
        "from nearfar.edge_runtime import devices\nfor name in devices.device_names(): devices.device(name)",
        "from nearfar.page_server import Site",
    ],
)
def test_a_part_is_had_without_what_the_whole_needs(code: str) -> None:
    run(RUNTIME, code)


def test_the_bar_holds() -> None:
    with pytest.raises(AssertionError, match="imported tokenizers"):
        run(RUNTIME, "import nearfar.edge_runtime.text.codec")


def test_an_artifact_is_shown_without_runtime_or_compiler(tmp_path: Path) -> None:
    path = tiny.write_artifact(tmp_path / "tiny")
    run(RUNTIME, "from nearfar.cli import typer_app\ntyper_app(['inspect', sys.argv[2]])", path)


def test_launches_are_timed_without_compiler_or_server() -> None:
    code = "from nearfar.cli import typer_app\ntyper_app(['bench', 'kernels', '--help'])"
    run("tvm,torch,httpx,fastapi,wgpu,vulkan,mlx,matplotlib", code)


def test_a_terminal_needs_no_server() -> None:
    run(
        "tvm,torch,transformers,fastapi,starlette,pydantic,uvicorn,httpx,prometheus_client",
        "import nearfar.cli.run, nearfar.cli.chat, nearfar.cli.session.editor",
    )


def test_a_checkpoint_is_opened_and_checked_without_tvm(checkpoint: Path, tmp_path: Path) -> None:
    code = """
from pathlib import Path
from nearfar.build.source import BuildOptions, open_source
source = open_source(BuildOptions(sys.argv[2], Path(sys.argv[3])))
assert source.matrices and source.scheme.bits == 4
"""
    run("tvm,tvm_ffi,torch,transformers", code, checkpoint, tmp_path / "out")


@pytest.fixture
def checkpoint() -> Path:
    """A real checkpoint."""
    return shared_data("models", "classics-7M")
