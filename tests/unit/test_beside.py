"""Programs compiled by several processes; tests/e2e/test_build.py tests that they are the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from nearfar.build import manifest
from nearfar.build.program.beside import Share, beside, shares
from nearfar.build.program.compile import Compilation
from nearfar.errors import BuildError
from nearfar.kernels.buckets import Buckets
from nearfar.kernels.contract import Variant
from nearfar.kernels.emission import EmitContext
from nearfar.step.model import Model, Step
from nearfar.targets.webgpu import VARIANTS
from nearfar.targets.webgpu.emit import emit


def share(kind: str) -> Share:
    model = Model("none", 8, 8, None, (), Step((), (), (), {}))
    job = Compilation(model, {}, manifest.CACHE, Buckets())
    return Share({"kind": kind}, emit, job, (VARIANTS[0],), EmitContext(Path(), {}, 0))


def classes(variants: Sequence[Variant]) -> list[str | None]:
    return list(dict.fromkeys(each.device_class for each in variants))


@pytest.mark.parametrize("processors", [1, 2, 3, 64])
def test_programs_of_a_class_stay_together(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearfar.build.program.beside.processors", lambda: processors)
    cut = shares(VARIANTS)
    assert len(cut) == min(processors, len(classes(VARIANTS)))
    assert sorted(each.name for part in cut for each in part) == sorted(each.name for each in VARIANTS)
    held = [name for part in cut for name in classes(part)]
    assert sorted(map(str, held)) == sorted(map(str, classes(VARIANTS)))
    assert shares(cut[0][:1]) == [cut[0][:1]]
    assert shares([]) == [()]


def test_a_process_that_fails_is_an_error_that_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        beside(share("tpu")) as made,
        pytest.raises(BuildError, match=r"compiles kernels ended with status 1, please report it"),
    ):
        made()
    assert "tpu" in capfd.readouterr().err


def children() -> set[psutil.Process]:
    """The children of this process, including those that other tests left."""
    return set(psutil.Process().children())


def test_a_process_that_is_killed_is_an_error() -> None:
    before = children()
    with beside(share("webgpu")) as made:
        (other,) = children() - before
        other.kill()
        with pytest.raises(BuildError, match=r"status -9: perhaps there was not enough memory"):
            made()


def test_no_process_outlives_its_block() -> None:
    before = children()
    with beside(share("webgpu")):
        (other,) = children() - before
        assert other.is_running()
    assert not other.is_running()
