"""Which modules an action imports: run in a process of its own, in which the heavy libraries cannot be
imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.shared_data import shared_data
from tests.support import tiny
from tests.support.hub import hub
from tests.support.servers import tiny_checkpoint

BARRED = """
import sys

class Barred:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BARRED:
            raise AssertionError(f"imported {name}")

BARRED = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Barred())
"""
PATIENCE, MODULES = 20, 1100
"""Seconds for a process that does nearly nothing, on a busy machine; and the most modules that it may import:
a build imports 2,500.
"""
RUNTIME = "tvm,tvm_ffi,torch,tokenizers,jinja2,wgpu,vulkan,mlx,transformers"


def run(barred: str, code: str, *arguments: object, **environment: str) -> str:
    """Run code in a process where none of `barred` can be imported; its output."""
    command = [sys.executable, "-c", BARRED + code, barred, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "code",
    [
        "import nearfar",
        "from nearfar.edge_runtime.cache import SequenceTable",
        "from nearfar.edge_runtime.engine import scheduler",
        "from nearfar.edge_runtime.artifact.reader import Artifact",
        "from nearfar.edge_runtime import devices\nfor name in devices.device_names(): devices.device(name)",
        "from nearfar.cli.page_server import Site",
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
from nearfar.build.options import BuildOptions
from nearfar.build.source import open_source
source = open_source(BuildOptions(sys.argv[2], Path(sys.argv[3])))
assert source.matrices and source.scheme.bits == 4
"""
    run("tvm,tvm_ffi,torch,transformers", code, checkpoint, tmp_path / "out")


BUILD = """
import sys
for name in ("torch", "transformers", "safetensors"):
    sys.modules[name] = None  # as if it were not installed
from pathlib import Path
from nearfar.build.pipeline import BuildOptions, build
from nearfar.kernels.buckets import Buckets
source, out = sys.argv[1:]
small = {"buckets": Buckets((1,), (1,)), "cpu_features": ("native",), "kernel_cache": False}
build(BuildOptions(source, Path(out), ("cpu",), "q8", **small))
"""


def test_a_checkpoint_is_built_where_torch_and_transformers_are_not_installed(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "checkpoint")
    command = [sys.executable, "-c", BUILD, str(source), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "cpu" / "manifest.json").is_file()


@pytest.fixture
def checkpoint() -> Path:
    """A real checkpoint."""
    return shared_data("models", "classics-7M")


REFUSED = """
import os, shutil
from nearfar.errors import CheckpointError
shutil.which = lambda *a, **k: (_ for _ in ()).throw(AssertionError("a compiler is looked for"))
from nearfar.cli import typer_app
try:
    typer_app(sys.argv[2:], standalone_mode=False)
except CheckpointError as error:
    print(error)
print(len(sys.modules))
"""


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "mamba2"}, "model_type is 'mamba2'; nearfar can build: "),
        ({"model_type": "gemma3", "text_config": {"model_type": "mpt"}}, "text_config.model_type is 'mpt'"),
        ({"architectures": ["GPT2LMHeadModel"]}, "config.json: has no model_type"),
    ],
)
def test_what_cannot_be_built_is_refused_by_its_config_alone(
    config: dict[str, object], said: str, tmp_path: Path
) -> None:
    """Locally and on the hub: nothing heavy is imported, and only config.json is requested."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"never read" * 1000)
    barred = "tvm,tvm_ffi,torch,transformers,numpy,ml_dtypes,tokenizers,mlx,safetensors,jsonschema"
    with hub({"someone/strange": folder}) as at:
        env = {
            "HF_ENDPOINT": at.url,
            "HF_HOME": str(tmp_path / "hub"),
            "NEARFAR_HOME": str(tmp_path / "home"),
        }
        for source in (str(folder), "someone/strange"):
            start = time.monotonic()
            told = run(barred, REFUSED, "build", source, "-o", tmp_path / "out", **env)
            assert time.monotonic() - start < PATIENCE
            message, modules = told.splitlines()
            assert message.startswith(f"{source}: config.json: ")
            assert said in message
            assert "nearfar serve tries it through transformers" in message
            assert int(modules) < MODULES
            if source == "someone/strange":  # the name as run, chat, web and pull take it
                run("tvm,transformers,torch,tokenizers", REFUSED, "pull", source, **env)
        assert {line.split()[1].split("/")[-1] for line in at.asked if "resolve" in line} == {"config.json"}
    assert not (tmp_path / "out").exists()
