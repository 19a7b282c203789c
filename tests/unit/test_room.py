"""Nothing is computed or downloaded for which the disk has no room."""

from __future__ import annotations

import asyncio
import errno
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from nearfar.build.pipeline import BuildOptions, build
from nearfar.build.weights.hub import download
from nearfar.downloads import Receiver
from nearfar.errors import BuildError, CheckpointError
from nearfar.fallback_server.engines.opening import LOOKED_AT, EngineOptions, open_engine
from nearfar.room import lacking
from tests.shared_data import shared_data
from tests.support.hub import hub, talk_to

SAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sample-model"
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that makes every disk have this many bytes free."""
    return lambda count: monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, count))


def test_a_build_asks_for_the_weights_of_every_target(tmp_path: Path, free: Callable[[int], None]) -> None:
    told: list[str] = []

    def options(*targets: str) -> BuildOptions:
        return BuildOptions(str(SAMPLE), tmp_path / "new" / "out", targets, "q4")

    free(3_000_000)  # there is room for one model of 2.8 MB, but not for two
    with pytest.raises(
        BuildError, match=r"mlx, cpu needs 5.6 MB at least, .*has 3.0 MB free: free some space"
    ):
        build(options("mlx", "cpu"), lambda stage, done, total: told.append(stage))
    assert told == []
    assert list(tmp_path.iterdir()) == []
    (path,) = build(options("mlx"))
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert 2_500_000 < weights < 3_000_000
    free(weights - 200_000)
    with pytest.raises(BuildError, match="NEARFAR_HOME"):
        build(options("mlx"))


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_download_asks_for_what_the_cache_lacks(
    tmp_path: Path, free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub({"someone/stories": shared_data("models", "stories260K")}) as at:
        talk_to(at, tmp_path / "cache", monkeypatch)
        free(500_000)
        with pytest.raises(
            CheckpointError, match=r"download of someone/stories needs 1.1 MB .* has 500.0 kB free: .*HF_HOME"
        ):
            download("someone/stories")
        with pytest.raises(CheckpointError, match=r"download of someone/stories needs"):
            asyncio.run(open_engine(("someone/stories",), "torch", EngineOptions()))
        assert at.fetched() <= set(LOOKED_AT)  # these files tell whether the model can be served at all
        free(50_000_000)
        with monkeypatch.context() as full:
            full.setattr(Receiver, "receive", no_room)
            with pytest.raises(
                CheckpointError,
                match=r"cannot be written: No space left on device\. Free some space, or set HF_",
            ):
                download("someone/stories")
        folder = download("someone/stories")
        free(0)
        assert download("someone/stories") == folder, "all of it is there"


def test_a_disk_that_does_not_say_is_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(path: Path) -> Usage:
        raise OSError("no such call")

    monkeypatch.setattr(shutil, "disk_usage", silent)
    assert lacking(Path("anywhere"), 1 << 60) is None
