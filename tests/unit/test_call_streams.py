"""The reader of answers with any text: it never raises, its result does not depend on where the text is cut,
and it loses nothing of what models are told to write.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from nearfar.edge_runtime.tools.reading import AnswerReader, Fragment
from nearfar.edge_runtime.tools.writing import written_call
from nearfar.format.answers import AnswerFormat, CallFormat
from nearfar.format.conversion import record
from tests.support.paths import ROOT

READING = json.loads((ROOT / "tests/vectors/tools/reading.json").read_text(encoding="utf-8"))
FORMATS: dict[str, AnswerFormat] = {name: record(AnswerFormat, f) for name, f in READING["formats"].items()}
JSON_FORMATS = sorted(name for name, form in FORMATS.items() if form.calls and form.calls.spelling is None)
NAMES = ("weather", "time")


def read(form: AnswerFormat, pieces: Seq[str], *, cut: bool = False) -> list[tuple[str, str]]:
    """Fragments, with neighbours of the same kind joined."""
    reader = AnswerReader(form, READING["tools"])
    fragments = [one for piece in pieces for one in reader.push(piece)] + reader.finish(cut=cut)
    made: list[Fragment] = []
    for one in fragments:
        if made and made[-1].kind == one.kind and one.kind in ("text", "reasoning", "arguments"):
            made[-1] = Fragment(one.kind, made[-1].text + one.text)
        else:
            made.append(one)
    return [(one.kind, one.text) for one in made]


def apart(text: str, places: Seq[int]) -> list[str]:
    """The text cut at these places."""
    ends = sorted({0, len(text), *(min(place, len(text)) for place in places)})
    return [text[start:end] for start, end in pairwise(ends)]


def marks(form: AnswerFormat) -> list[str]:
    calls, thought = form.calls, form.reasoning
    assert calls is not None
    found = [calls.begin, calls.end, calls.bare, *calls.also, form.text, *form.dropped]
    found += [thought.begin, thought.end] if thought else []
    found += [calls.named.before, calls.named.after, calls.named.until] if calls.named else []
    return [mark for mark in found if mark]


MARKS = sorted({mark for form in FORMATS.values() for mark in marks(form)})
ODD = ["[", "]", ",", ", ", "}", "{", "\n", "{}", '{"a": "}"}', '{"a": "\\"}', '{"city": "\\u00f8 ', '"',
       "\\", "weather", "time", "none", " ", '"name":', "x(", ")", '{"name": "wea\nther", "arguments": {',
       '{"name": "time", "arguments": {}}', '{"name": "time", "parameters": {}}', "=1e999)",
       '{"name": "weather", "arguments": ', "(city='", '<|"|>', "<parameter=city>\n", "{city:"]  # fmt: skip


def hostile(form: AnswerFormat) -> st.SearchStrategy[str]:
    """Texts of marks, halves of marks, and parts of calls."""
    halves = [mark[: len(mark) // 2] for mark in marks(form)]
    part = st.sampled_from([*marks(form), *halves, *ODD]) | st.text(max_size=3)
    return st.lists(part, max_size=14).map("".join)


@settings(max_examples=600, deadline=None)
@given(st.data(), st.sampled_from(sorted(FORMATS)), st.booleans(), st.lists(st.integers(1, 99), max_size=9))
def test_any_text_is_read_the_same_wherever_it_is_cut(
    data: st.DataObject, name: str, cut: bool, places: list[int]
) -> None:
    form = FORMATS[name]
    text = data.draw(hostile(form))
    whole = read(form, [text], cut=cut)
    assert read(form, apart(text, places), cut=cut) == whole
    assert read(form, list(text), cut=cut) == whole


STRINGS = st.lists(
    st.sampled_from([*MARKS, "\\", '"', "}", "{", "]", "\n"]) | st.text(max_size=4), max_size=4
)
VALUES = st.recursive(
    STRINGS.map("".join) | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS.map("".join), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(STRINGS.map("".join), VALUES, max_size=4)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)


def answer(form: CallFormat, calls: Seq[tuple[str, dict[str, Any]]]) -> str:
    return form.separator.join(written_call(form, name, arguments) for name, arguments in calls)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(JSON_FORMATS), CALLS, st.lists(st.integers(1, 300), max_size=20))
def test_arguments_come_to_the_last_character_whatever_marks_stand_in_them(
    name: str, calls: list[tuple[str, dict[str, Any]]], places: list[int]
) -> None:
    form = FORMATS[name]
    assert form.calls is not None
    calls = calls if form.calls.repeats else calls[:1]
    before = "" if form.calls.bare else "Well. "
    text = before + answer(form.calls, calls)
    expected = [("text", before)] if before else []
    for called, arguments in calls:
        given = json.dumps(arguments, ensure_ascii=False)
        expected += [("call", called), ("arguments", given), ("called", "")]
    assert read(form, [text]) == expected
    assert read(form, apart(text, places)) == expected


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(JSON_FORMATS), CALLS, st.integers(0, 400))
def test_what_came_of_a_call_that_is_cut_begins_the_whole(
    name: str, calls: list[tuple[str, dict[str, Any]]], length: int
) -> None:
    form = FORMATS[name]
    assert form.calls is not None
    text = answer(form.calls, calls[:1])
    made = read(form, list(text[:length]), cut=True)
    whole = read(form, [text])
    kinds = [kind for kind, _ in made if kind != "text"]
    assert kinds == [kind for kind, _ in whole][: len(kinds)]
    same = zip(made, whole, strict=False)
    assert all(full.startswith(begun) for (kind, begun), (_, full) in same if kind in ("call", "arguments"))
