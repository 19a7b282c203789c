"""The wheel: its content, and the same bytes from every build; a device needs no compiler, and a build no
torch.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.shared_data import shared_data
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
    return built.of(ROOT / "examples" / "sample-model", "q4", "cpu") / "cpu"


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


def test_it_has_the_same_bytes_from_another_folder_at_another_time(wheel: Path, tmp_path: Path) -> None:
    """Runs `python -m build` on a copy whose files have other times."""
    copy = tmp_path / "elsewhere"
    listed = run("git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    page = [path.relative_to(ROOT) for path in (ROOT / "web" / "dist").rglob("*") if path.is_file()]
    for name in [*map(Path, filter(None, listed.split("\0"))), *page]:
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name, follow_symlinks=False)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, copy, cwd=tmp_path)
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


class Bare:
    """A virtual environment away from the repository, with the wheel and those of the packages installed here
    that its extras require.

    Linking the packages saves the 40 CPU seconds in which pip would download, unpack and compile them.
    """

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder
        self.environment = {
            key: value
            for key, value in os.environ.items()
            if key not in ("PYTHONPATH", "VIRTUAL_ENV")
            # the wheel that is built there compiles its kernels there
        } | {"NEARFAR_KERNEL_CACHE": str(folder / "kernels")}
        run(sys.executable, "-m", "venv", "--without-pip", folder / "environment")
        self._interpreter = folder / "environment" / "bin" / "python"
        pip = (sys.executable, "-m", "pip", "--python", self._interpreter, "install", "--quiet", "--no-deps")
        run(*pip, wheel)
        (self._packages,) = (folder / "environment").glob("lib/*/site-packages")
        (info,) = self._packages.glob("nearfar-*.dist-info")
        self._wheel = metadata.PathDistribution(info)
        self._linked: set[tuple[str, str]] = set()

    def python(self, *arguments: object) -> str:
        return run(self._interpreter, *arguments, env=self.environment, cwd=self.folder)

    def add(self, *extras: str) -> None:
        """Add the packages that the wheel requires with these extras."""
        for extra in extras:
            self._link_needs(self._wheel, extra)

    def _link_needs(self, of: metadata.Distribution, extra: str) -> None:
        if (of.name, extra) in self._linked:
            return
        self._linked.add((of.name, extra))
        for requirement in map(Requirement, of.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                needed = metadata.distribution(requirement.name)
                assert requirement.specifier.contains(needed.version, prereleases=True), requirement
                self._link(needed)
                for more in ("", *requirement.extras):
                    self._link_needs(needed, more)

    def _link(self, package: metadata.Distribution) -> None:
        for name in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            link = self._packages / name
            if not link.exists():
                link.symlink_to(Path(str(package.locate_file(name))))

    def has(self, *names: str) -> list[str]:
        code = f"import importlib.util as u; print(*[n for n in {names!r} if u.find_spec(n)])"
        return self.python("-c", code).split()


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Bare:
    return Bare(tmp_path_factory.mktemp("bare"), wheel)


def test_the_cpu_artifact_runs_without_tvm_and_torch(artifact: Path, bare: Bare) -> None:
    bare.add("edge")
    assert bare.has("tvm", "torch", "transformers") == []
    question = ("-m", "nearfar", "run", artifact, PROMPT, "--max-tokens", "24", "--temperature", "0")
    on_device = bare.python(*question)
    assert on_device.strip()
    assert on_device == run(sys.executable, *question)
    assert "Artifacts can be run here" in bare.python("-m", "nearfar", "doctor")


def test_a_build_needs_no_torch(bare: Bare) -> None:
    """With the extra `build` the bare environment turns a checkpoint into an artifact that answers."""
    bare.add("build", "edge")
    assert bare.has("tvm", "transformers", "torch", "ray", "mlx") == ["tvm"]
    checkpoint = shared_data("models", "stories260K")
    options = "--target cpu --quant none --cpu-features native -o out"
    bare.python("-m", "nearfar", "build", checkpoint, *options.split())
    golden = shared_data("models", "stories260K", "golden_greedy.txt").read_text(encoding="utf-8")
    greedy = ("--raw", "--max-tokens", 199, "--temperature", 0)
    assert bare.python("-m", "nearfar", "run", "out/cpu", "", *greedy).strip() == golden.strip()
