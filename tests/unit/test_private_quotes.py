"""Which quotations of a private text are found, measured; and the state that is kept between starts."""

from __future__ import annotations

import asyncio
import json
import stat
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearfar import machine
from nearfar.errors import RequestError
from nearfar.routing.policy import Policy
from nearfar.routing.privacy import WINDOWS, PrivateTexts
from nearfar.routing.quotes import FOUND, RUN, WINDOW, letters, windows
from nearfar.routing.router import Router

TEXT = "Dear diary, the word for my account is quokka, and nobody may know it."
WORDS = st.text(st.characters(categories=["Lu", "Ll", "Lo", "Nd"]), min_size=1, max_size=12)
SIGNS = st.sampled_from(
    [" ", "\n", "\n> ", ", ", "  \t", "\n>> - ", " **", "_ ", '"', "… ", "\u00a0", "\r\n"]
)
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool"])


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEARFAR_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def user(text: str, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def told(texts: PrivateTexts, text: str, conversation: str | None = None) -> PrivateTexts:
    texts.remember(texts.marks(user(text)), conversation)
    return texts


def spelt(words: list[str], signs: list[str]) -> str:
    """Words with other signs between them."""
    return "".join(word + signs[at % len(signs)] for at, word in enumerate(words))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_quotation_long_enough_is_found_wherever_it_stands_and_however_it_is_set(
    data: st.DataObject,
) -> None:
    words = data.draw(st.lists(WORDS, min_size=8, max_size=60))
    first = data.draw(st.integers(0, len(words) - 1))
    last = data.draw(st.integers(first + 1, len(words)))
    quoted = words[first:last]
    signs = st.lists(SIGNS, min_size=1, max_size=5)
    around = st.text(max_size=80)
    said = data.draw(around) + " " + spelt(quoted, data.draw(signs)) + data.draw(around)
    if data.draw(st.booleans()):
        said = json.dumps({"said": said}, ensure_ascii=data.draw(st.booleans()))
    texts = told(PrivateTexts(), spelt(words, data.draw(signs)))
    found = texts.known(texts.marks(user(said, data.draw(ROLES))), None)
    if len(letters("".join(quoted))) >= FOUND:
        assert found is not None


@given(st.text(max_size=300), st.text(max_size=300))
@settings(max_examples=100, deadline=None)
def test_what_shares_less_than_a_window_is_no_quotation(private: str, other: str) -> None:
    ours, theirs = letters(private), letters(other)
    shared = any(theirs[at : at + WINDOW] in ours for at in range(len(theirs) - WINDOW + 1))
    texts = told(PrivateTexts(), private)
    marks = texts.marks([*user("Hello"), *user(other)])
    assert shared or texts.known(marks, None) != "quote"


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_of_each_run_of_windows_one_is_picked(data: bytes) -> None:
    picked = windows(data)
    each = [data[at : at + WINDOW] in picked for at in range(len(data) - WINDOW + 1)]
    runs = [each[at : at + RUN] for at in range(max(len(each) - RUN + 1, min(len(each), 1)))]
    assert all(map(any, runs))


def test_the_windows_kept_are_bounded() -> None:
    texts = PrivateTexts()
    for number in range(8):
        words = " ".join(f"w{number}x{at * 7919 % 1000003}" for at in range(12_000))
        told(texts, words)
    assert len(texts._windows) == WINDOWS
    assert texts.known(texts.marks(user(f"Is it {words[5000:5100]}?")), None) == "quote"


def test_from_start_to_start_without_a_word_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json.private"
    told(PrivateTexts(path), TEXT, "a")
    assert not [word for word in ("diary", "quokka", "account") if word in path.read_text()]
    if sys.platform != "win32":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = PrivateTexts(path)
    assert again.known(again.marks(user("Title: " + TEXT)), None) == "quote"
    assert again.known(again.marks(user(TEXT)), None) == "earlier"
    assert again.known(again.marks(user("Hello")), "a") == "earlier"
    size = path.stat().st_size
    told(again, TEXT, "a")
    assert path.stat().st_size == size, "what is known is not written again"


def test_a_line_that_a_process_did_not_end_is_left_out_and_a_broken_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "private"
    told(PrivateTexts(path), TEXT)
    path.write_text(path.read_text() + '{"conversations": ["b"')
    again = told(PrivateTexts(path), "Another text", "c")
    assert again.known(again.marks(user("Title: " + TEXT)), None) == "quote"
    assert PrivateTexts(path).known(again.marks(user("Hello")), "c") == "earlier"
    path.write_text("{}\n" + path.read_text())
    with pytest.raises(RequestError, match="does not say what was private"):
        PrivateTexts(path)


def test_a_file_that_has_grown_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "private"
    texts = told(PrivateTexts(path), TEXT, "a")
    for number in range(30):
        told(texts, f"note {number}")
    monkeypatch.setattr("nearfar.routing.marks_file.LINES", 20)
    again = PrivateTexts(path)
    assert len(path.read_text().splitlines()) == 2
    for texts in (again, PrivateTexts(path)):
        assert texts.known(texts.marks(user("Title: " + TEXT)), None) == "quote"
        assert texts.known(texts.marks(user("note 29")), "a") == "earlier"


def test_under_another_key_only_conversations_are_known_again(tmp_path: Path, home: Path) -> None:
    path = tmp_path / "private"
    told(PrivateTexts(path), TEXT, "a")
    machine.key_file().unlink()
    again = PrivateTexts(path)
    assert again.known(again.marks(user(TEXT)), None) is None
    assert again.known(again.marks(user("Hello")), "a") == "earlier"
    told(again, TEXT)
    assert PrivateTexts(path).known(again.marks(user(TEXT)), None) == "earlier"


def test_a_state_of_the_old_form_brings_its_conversations(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    state.write_text(json.dumps({"version": 1, "ledger": {}, "private": ["a"]}))
    asyncio.run(Router(None, None, Policy(), None, state, None).close())
    assert json.loads(state.read_text())["version"] == 2
    assert "private" not in json.loads(state.read_text())
    router = Router(None, None, Policy(), None, state, None)
    assert router._private.known(router._private.marks(user("Hello")), "a") == "earlier"
