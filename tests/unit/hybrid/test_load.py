"""A hybrid client writes its state while answers continue, and loses nothing of it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nearfar.routing.marks_file import MarksFile
from nearfar.routing.policy import Policy
from nearfar.routing.request import Asked, Hints
from nearfar.routing.router import Router
from nearfar.routing.store import StateFile, StateWriter


class Slow(StateFile):
    """A disk that can be made to hang, and that records what it was given."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.goes_on = threading.Event()
        self.given: list[int] = []

    def save(self, content: Mapping[str, Any]) -> None:
        self.given.append(content["n"])
        assert self.goes_on.wait(60)
        super().save(content)


def kept(path: Path) -> Any:
    return json.loads(path.read_text())


async def test_changes_cost_no_answer_and_are_written_together(tmp_path: Path) -> None:
    file, number = Slow(tmp_path / "state.json"), 0
    writer = StateWriter(file, lambda: {"n": number})
    for number in range(1, 101):  # noqa: B007  (the writer reads it)
        writer.changed()
        await asyncio.sleep(0)  # while the disk hangs, answers go on
    settled = asyncio.create_task(writer.settled())
    await asyncio.sleep(0)
    assert not settled.done()
    file.goes_on.set()
    await settled
    assert len(file.given) <= 3
    assert kept(file.path)["n"] == 100  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [1, 2, 9])
def test_what_changed_is_kept_when_the_loop_ends_with_nobody_closing(tmp_path: Path, changes: int) -> None:
    file, number = Slow(tmp_path / "state.json"), 0
    file.goes_on.set()

    async def main() -> None:
        nonlocal number
        writer = StateWriter(file, lambda: {"n": number})
        for number in range(1, changes + 1):  # noqa: B007  (the writer reads it)
            await asyncio.sleep(0)
            writer.changed()

    asyncio.run(main())
    assert kept(tmp_path / "state.json")["n"] == changes


class _Asked(Exception):
    """Raised when the router begins to look at a request."""


async def test_a_conversation_is_kept_as_private_before_anything_is_done_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, marks = tmp_path / "state.json", tmp_path / "state.json.private"
    router = Router(None, None, Policy(), None, path, None)

    async def measure(*_: Any) -> Any:
        assert [known.conversations for known in MarksFile(marks).load()] == [("diary",)]
        raise _Asked

    monkeypatch.setattr(router, "_measure", measure)
    asked = Asked(({"role": "user", "content": "a secret"},), {}, Hints(private=True, conversation="diary"))
    with pytest.raises(_Asked):
        await router.plan(asked)
    again = Router(None, None, Policy(), None, path, None)
    assert again._private.known(again._private.marks(()), "diary") == "earlier"
    await router.close()
