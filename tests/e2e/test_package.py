"""The wheel: what it holds, and that a device needs no compiler: the CPU artifact runs without tvm and
torch.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.artifacts import Built

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "Tell me about the fox."


def run(*command: object, **options: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out, ROOT)
    (path,) = out.glob("nearfar-*.whl")
    return path


@pytest.fixture(scope="module")
def artifact(built: Built) -> Path:
    return built.of(ROOT / "examples" / "sample-model", "q4") / "cpu"


def test_the_wheel_holds_the_package_its_data_and_the_page(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert not [name for name in names if not name.startswith(("nearfar/", "nearfar-"))], (
        "top-level names besides nearfar"
    )
    for folder in ("build", "targets", "edge_runtime", "cli"):
        sources = [
            path for path in (ROOT / "src" / "nearfar" / folder).resolve().rglob("*") if path.is_file()
        ]
        missing = [
            str(path)
            for path in sources
            if "__pycache__" not in path.parts
            and f"nearfar/{folder}/{path.relative_to((ROOT / 'src/nearfar' / folder).resolve()).as_posix()}"
            not in names
        ]
        assert not missing
    if (ROOT / "web" / "dist" / "page").is_dir():
        assert "nearfar/web_dist/page/index.html" in names


def test_the_cpu_artifact_runs_without_tvm_and_torch(wheel: Path, artifact: Path, tmp_path: Path) -> None:
    environment = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    run(sys.executable, "-m", "venv", tmp_path / "device")
    python = tmp_path / "device" / "bin" / "python"
    run(
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        f"nearfar[edge] @ {wheel.as_uri()}",
        env=environment,
        cwd=tmp_path,
    )
    code = (
        "import importlib.util as u; print([n for n in ('tvm', 'torch', 'transformers') if u.find_spec(n)])"
    )
    assert run(python, "-c", code, env=environment, cwd=tmp_path).strip() == "[]"
    question = ("-m", "nearfar", "run", artifact, PROMPT, "--max-tokens", "24", "--temperature", "0")
    on_device = run(python, *question, env=environment, cwd=tmp_path)
    assert on_device.strip()
    assert on_device == run(sys.executable, *question)
