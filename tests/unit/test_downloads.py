"""Downloads continue where they ended, whatever a host answers; for the hub and for artifacts."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nearfar import downloads
from nearfar.downloads import Receiver, Refused, Reply
from nearfar.errors import StoreError
from nearfar.interruptible import Stopped

WHOLE = b"0123456789"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "PAUSE", 0.001)


@pytest.fixture
def receiver() -> Receiver:
    return Receiver(threading.Event(), StoreError, "SOME_HOME")


def receive(receiver: Receiver, part: Path, *replies: Reply, size: int | None = 10) -> list[int]:
    """Let each attempt get the next of the replies; gives the offsets that the attempts asked for."""
    asked, left = [], iter(replies)

    @contextmanager
    def ask(start: int) -> Iterator[Reply]:
        asked.append(start)
        yield next(left)

    def attempt() -> None:
        receiver.receive("some file", ask, part, size, 10, lambda there, got: None)

    receiver.persist(attempt, part.parent, (OSError,))
    return asked


def rest(start: int, stated: int | None = None, *, until: int = 10) -> Reply:
    return Reply(
        206, "", f"bytes {start if stated is None else stated}-9/10", None, iter([WHOLE[start:until]])
    )


def test_it_goes_on_where_it_was_cut(receiver: Receiver, tmp_path: Path) -> None:
    part = tmp_path / "part"
    cut = Reply(200, "", "", 10, iter([WHOLE[:4]]))
    assert receive(receiver, part, cut, rest(4, until=7), rest(7)) == [0, 4, 7]
    assert part.read_bytes() == WHOLE
    assert receive(receiver, part) == []


def test_a_host_without_ranges_sends_all_of_it_again(receiver: Receiver, tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.write_bytes(b"xxxx")
    assert receive(receiver, part, Reply(200, "", "", 10, iter([WHOLE]))) == [4]
    assert part.read_bytes() == WHOLE


def test_another_range_than_was_asked_for_is_not_taken(receiver: Receiver, tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.write_bytes(WHOLE[:4])
    whole = Reply(200, "", "", 10, iter([WHOLE]))
    assert receive(receiver, part, rest(4, stated=5), whole) == [4, 0]
    assert part.read_bytes() == WHOLE


def test_what_is_longer_than_the_file_is_fetched_anew(receiver: Receiver, tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.write_bytes(WHOLE + WHOLE)
    assert receive(receiver, part, Reply(200, "", "", 10, iter([WHOLE]))) == [0]
    part.write_bytes(WHOLE[:8])  # the host's file is shorter now, which only its response shows
    short = Reply(200, "", "", 5, iter([WHOLE[:5]]))
    assert receive(receiver, part, Reply(416, "Range Not Satisfiable"), short, size=None) == [8, 0]
    assert part.read_bytes() == WHOLE[:5]


def test_more_than_a_file_may_have_is_refused(receiver: Receiver, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="some file has more than the 10 bytes that are allowed"):
        receive(receiver, tmp_path / "part", Reply(200, "", "", None, iter([WHOLE, b"x"])), size=None)


@pytest.mark.parametrize(("status", "tries"), [(404, 1), (403, 1), (429, 4), (503, 4)])
def test_what_may_pass_is_tried_again(receiver: Receiver, tmp_path: Path, status: int, tries: int) -> None:
    replies = [Reply(status, "So it is") for _ in range(tries)]
    with pytest.raises(Refused, match=f"the host answers {status} So it is"):
        receive(receiver, tmp_path / "part", *replies)


def test_a_full_disk_is_told_with_what_to_do(receiver: Receiver, tmp_path: Path) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StoreError, match=r"cannot be written: No space left on device\. .*set SOME_HOME to"):
        receiver.persist(full, tmp_path, (OSError,))


def test_stop_ends_it_between_pieces_and_between_tries(receiver: Receiver, tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield WHOLE[:4]
        receiver.stop.set()
        yield WHOLE[4:]

    with pytest.raises(Stopped):
        receive(receiver, tmp_path / "part", Reply(200, "", "", 10, pieces()))
    assert (tmp_path / "part").read_bytes() == WHOLE[:4]
    with pytest.raises(Stopped):
        receive(receiver, tmp_path / "part", Reply(503))
