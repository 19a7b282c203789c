"""The sampling defaults of generation_config.json reach every answer whose request does not set them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.shared_data import shared_data
from tests.support.commands import nearfar

RAW = ("--raw", "--device", "mlx", "--max-tokens", 40)
GOLDEN = "golden_greedy.txt"


def checkpoint(folder: Path, **wanted: Any) -> Path:
    """stories260K with these sampling defaults."""
    shutil.copytree(shared_data("models", "stories260K"), folder)
    (folder / "generation_config.json").write_text(json.dumps(wanted))
    return folder


@pytest.fixture(scope="module")
def greedy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact whose default is greedy sampling."""
    root = tmp_path_factory.mktemp("greedy")
    model = checkpoint(root / "model", temperature=0.0, top_k=7, max_length=20)
    done = nearfar("build", model, "--target", "mlx", "--quant", "none", "-o", root / "out")
    assert done.returncode == 0, done.stderr
    return root / "out" / "mlx"


def run(artifact: Path, *more: object) -> str:
    done = nearfar("run", artifact, *RAW, *more, "")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_run_draws_as_the_model_wants(greedy: Path) -> None:
    golden = (shared_data("models", "stories260K") / GOLDEN).read_text()
    assert golden.startswith(run(greedy, "--seed", 1).strip())


def test_an_option_goes_before_the_model(greedy: Path) -> None:
    drawn = {run(greedy, "--temperature", 1.5, "--top-k", 0, "--seed", seed) for seed in (1, 2)}
    assert len(drawn) == 2


def test_inspect_shows_it(greedy: Path) -> None:
    assert json.loads(nearfar("inspect", greedy, "--json").stdout)["sampling"] == {
        "temperature": 0.0,
        "top_k": 7,
    }
    assert "temperature 0.0, top_k 7" in nearfar("inspect", greedy).stdout


def test_what_no_request_could_have_is_refused_at_the_build(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", top_p=1.5)
    done = nearfar("build", model, "--target", "mlx", "-o", tmp_path / "out")
    assert done.returncode == 1
    said = " ".join(done.stderr.split())
    assert (
        "generation_config.json: top_p must be a number in (0, 1], not 1.5: correct it, or remove it" in said
    )
    assert not (tmp_path / "out").exists()
