"""An output directory appears whole or not at all."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nearfar.build.output import output_directory
from nearfar.errors import BuildError

ARTIFACT = '{"format": "nearfar-artifact", "version": 99}'
BUILDER = """
import sys, time
from pathlib import Path
from nearfar.build.output import output_directory
with output_directory(Path(sys.argv[1])) as directory:
    (directory / "half").write_text("written")
    print("ready", flush=True)
    time.sleep(60)
"""


def start_builder(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def build(path: Path, text: str = ARTIFACT) -> None:
    with output_directory(path) as directory:
        assert directory.parent == path.parent.resolve()
        (directory / "manifest.json").write_text(text)


def test_appears_at_the_end_and_replaces_an_earlier_artifact(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "out"
    with output_directory(path) as directory:
        (directory / "manifest.json").write_text(ARTIFACT)
        (directory / "old").touch()
        assert not path.exists()
    assert names(path) == ["manifest.json", "old"]
    build(path)
    assert names(path) == ["manifest.json"]
    assert names(path.parent) == ["out"]


def test_empty_directory_is_taken_but_nothing_else_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    build(tmp_path / "empty")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    for manifest in ("{", "[" * 100_000, "[]"):
        (tmp_path / "mine" / "manifest.json").write_text(manifest)
        with pytest.raises(BuildError, match="not empty"):
            build(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match="is a file"):
        build(tmp_path / "file")
    assert names(tmp_path) == ["empty", "file", "mine"]


def test_an_exception_leaves_the_earlier_artifact(tmp_path: Path) -> None:
    build(tmp_path / "out")
    with pytest.raises(FileExistsError), output_directory(tmp_path / "out") as directory:
        (directory / "half").mkdir() or (directory / "half").mkdir()
    assert names(tmp_path / "out") == ["manifest.json"]
    assert names(tmp_path) == ["out"]


def test_full_disk_is_a_build_error(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="full"), output_directory(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device", "plans/f32/step.1.json")
    assert names(tmp_path) == []


def test_two_processes(tmp_path: Path) -> None:
    first = start_builder(tmp_path / "out")
    try:
        with pytest.raises(BuildError, match=f"process {first.pid} is building"):
            build(tmp_path / "out")
        build(tmp_path / "other")
    finally:
        first.kill()
        first.communicate()
    # the killed process left files; its lock is free, so the next build removes them
    assert any("partial" in name for name in names(tmp_path))
    build(tmp_path / "out")
    assert names(tmp_path) == ["other", "out"]


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    process = start_builder(tmp_path / "out")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in errors
    assert names(tmp_path) == []


def test_killed_between_the_two_renames(tmp_path: Path) -> None:
    build(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / ".out.old-12345")
    with pytest.raises(RuntimeError), output_directory(tmp_path / "out"):
        raise RuntimeError
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "manifest.json").read_text() == ARTIFACT


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_parent(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(BuildError, match="cannot write"):
        build(tmp_path / "out")
