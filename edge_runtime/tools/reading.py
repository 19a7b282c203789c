"""Separates the parts that a model marks in its text, reasoning and tool calls, while the text arrives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal

from nearfar.edge_runtime.tools.calls import BLANKS, Call, begun_call, calls_in
from nearfar.edge_runtime.tools.loose import Opening, Unsure, candidates, following, opening
from nearfar.edge_runtime.tools.nesting import Nesting
from nearfar.edge_runtime.tools.streaming import CallHead, head_in, streamed
from nearfar.format.answers import AnswerFormat


@dataclass(frozen=True)
class Fragment:
    """A piece of an answer: text for the user, or reasoning.

    "call": a call begins, and `text` is its tool's name. "arguments": a piece of the JSON of its arguments.
    "called": the call is complete.
    """

    kind: Literal["text", "reasoning", "call", "arguments", "called"]
    text: str = ""


class AnswerReader:
    """Splits a text while it arrives. A possible beginning of a mark is held back until it is certain.

    A call with JSON arguments is passed on as it arrives, once its arguments begin; other sections of calls
    are held until they end.
    """

    def __init__(
        self,
        form: AnswerFormat,
        tools: Seq[Mapping[str, Any]] = (),
        *,
        reasoning_open: bool = False,
        calls_only: bool = False,
        loose: bool = False,
    ) -> None:
        """`tools`: the tools that may be called; without any, calls are text. `reasoning_open`: the prompt
        has begun a section of reasoning. `calls_only`: text between calls (cut marks, blank lines) is
        dropped. `loose`: calls that do not keep to the format count, too (loose.py).
        """
        self._form, self._tools = form, tools
        self._calls = form.calls if tools else None
        self._only = calls_only
        self._names = frozenset(tool["function"]["name"] for tool in tools)
        self._loose = loose and self._calls is not None
        self._loosely: Opening | None = None  # the opening of a call that does not keep to the format
        self._fresh = True  # the held text begins a line
        self._kind: Literal["text", "reasoning", "call", "arguments", "record", "behind"] = (
            "reasoning" if form.reasoning and reasoning_open else "text"
        )
        self._held = ""
        self._mark = ""  # the mark that began the section of calls
        self._strip = False
        self._start = True  # no text for the user has come yet
        self._nesting = Nesting()
        # a call of this section has been passed on; "list" says that more may come
        self._after: Literal["", "call", "list"] = ""

    def push(self, text: str) -> list[Fragment]:
        """The fragments that become certain with this text."""
        self._held += text
        return list(self._split(last=False))

    def finish(self, *, cut: bool = False) -> list[Fragment]:
        """The fragments that were held back, since the text ends; `cut`: the model did not end it itself."""
        made = list(self._split(last=True))
        held, self._held = self._held, ""
        if self._kind == "behind":  # the held text is the rest of a fence, or it is not a call
            self._kind = "text"
            return [*made, *self._plain(held if "{" in held and not cut else "")]
        if self._kind != "call":
            return [*made, *self._plain(held)]
        unended = bool(self._calls and self._calls.end and self._mark)
        section = list(self._section(held, cut or unended))
        if not (section or cut or self._after or self._only):  # the model did not mean a call
            section = [Fragment("text", self._mark + held)]
        return [*made, *section]

    def _split(self, *, last: bool) -> Iterator[Fragment]:
        while True:
            if self._strip:  # blank lines behind a section belong to the section
                self._held = self._held.lstrip("\n")
                self._strip = not self._held
            if self._streaming:
                yield from self._streamed()
                if self._streaming:
                    return
            if self._kind == "behind":
                yield from self._behind()
                if self._kind == "behind":
                    return
                continue
            if self._awaits_bare(last):
                return
            marks = self._next_marks()
            if self._kind == "call" and (head := self._head(marks)) is not None:
                yield Fragment("call", head.name)
                self._held = self._held[head.end :]
                self._kind, self._nesting = "arguments", Nesting()
                self._after = "list" if head.listed else "call"
                continue
            at, mark = _first(self._held, marks, last)
            if self._kind == "text" and self._loose and (found := self._first_loose(at, last)) is not None:
                start, begun = found
                before, self._held = self._held[:start], self._held[start:]
                yield from self._plain(before)
                if isinstance(begun, Unsure):
                    return
                yield from self._begin_loose(begun)
                continue
            if mark is None:
                if self._kind != "call":
                    out, self._held = self._held[:at], self._held[at:]
                    yield from self._plain(out)
                return
            before, self._held = self._held[:at], self._held[at + len(mark) :]
            if self._kind == "call":
                yield from self._section(before, False)
            else:
                yield from self._plain(before)
            self._switch(mark)

    @property
    def _streaming(self) -> bool:
        return self._kind in ("arguments", "record")

    def _streamed(self) -> Iterator[Fragment]:
        """The held arguments of a call and of the object around them; after them the kind is "call" again."""
        while self._streaming and self._held:
            end = self._nesting.end(self._held)
            piece, self._held = self._held[:end], self._held[len(self._held) if end is None else end :]
            if self._kind == "arguments":
                yield Fragment("arguments", piece)
            if end is None:
                return
            if self._kind == "arguments":
                yield Fragment("called")
            is_object = self._loosely is not None or (self._calls is not None and self._calls.named is None)
            behind: Literal["behind", "call"] = "call" if self._loosely is None else "behind"
            self._kind = "record" if self._kind == "arguments" and is_object else behind
            self._nesting = Nesting(1)

    def _first_loose(self, until: int, last: bool) -> tuple[int, Opening | Unsure] | None:
        """The index before `until` where a call that does not keep to the format begins, or may begin; None
        if there is none.
        """
        for at in candidates(self._held, self._fresh):
            if at > until:
                break
            found = opening(self._held[at:], self._names)
            if found is not None and not (last and isinstance(found, Unsure)):
                return at, found
        return None

    def _begin_loose(self, call: Opening) -> Iterator[Fragment]:
        yield Fragment("call", call.name)
        self._held = self._held[call.end :]
        self._kind, self._nesting, self._loosely, self._start = "arguments", Nesting(), call, False

    def _behind(self) -> Iterator[Fragment]:
        """Process the held text after a loose call, as soon as it is certain."""
        assert self._loosely is not None
        found = following(self._held, self._names, self._loosely)
        if isinstance(found, Opening):
            yield from self._begin_loose(found)
        elif isinstance(found, int):
            self._held = self._held[found:]
            self._kind, self._loosely, self._strip, self._fresh = "text", None, True, True

    def _head(self, marks: Seq[str]) -> CallHead | None:
        """The head of the call with which the held text begins, if the call can be streamed."""
        calls = self._calls
        if calls is None or not streamed(calls, self._mark) or self._after == "call":
            return None
        head = head_in(self._held, calls, self._names, more=self._after == "list")
        return head if head and not any(mark in self._held[: head.end] for mark in marks) else None

    def _awaits_bare(self, last: bool) -> bool:
        """Whether more text is needed, because the held text may begin calls without a mark."""
        if self._kind != "text" or not self._start or not self._calls or not self._calls.bare:
            return False
        bare = self._calls.bare
        if self._held.startswith(bare):
            self._kind, self._mark, self._start = "call", "", False
            return False
        return not last and bare.startswith(self._held)

    def _next_marks(self) -> list[str]:
        """The marks that may end the current part."""
        form, calls = self._form, self._calls
        if self._kind == "reasoning":
            return [form.reasoning.end] if form.reasoning else []
        sections = [mark for mark in (calls.begin, *calls.also) if mark] if calls else []
        if self._kind == "call":
            if calls is None or not self._mark:
                return []
            return [calls.end] if calls.end else sections if calls.repeats else []
        if calls and calls.bare:
            held = self._held
            sections = [m for m in sections if self._start and (held.startswith(m) or m.startswith(held))]
        thinking = [form.reasoning.begin] if form.reasoning else []
        return [*thinking, *sections, *(mark for mark in (form.text, *form.dropped) if mark)]

    def _switch(self, mark: str) -> None:
        form, calls = self._form, self._calls
        self._after, self._fresh = "", True
        if self._kind == "reasoning" or (self._kind == "call" and calls and mark == calls.end):
            self._kind, self._strip = "text", True
        elif form.reasoning and mark == form.reasoning.begin:
            self._kind, self._strip = "reasoning", True
        elif calls and mark in (calls.begin, *calls.also):
            self._kind, self._mark, self._strip, self._start = "call", mark, True, False

    def _plain(self, text: str) -> Iterator[Fragment]:
        if not text:
            return
        if self._kind == "reasoning":
            yield Fragment("reasoning", text)
            return
        self._start = False
        line = text.rpartition("\n")[2]
        self._fresh = not line.strip(" \t") and (self._fresh or "\n" in text)
        if not self._only:
            yield Fragment("text", text)

    def _section(self, text: str, cut: bool) -> Iterator[Fragment]:
        """The calls of a section, as far as it came. A section that does not match the format is text."""
        calls = self._calls
        assert calls is not None
        begin, end = self._mark, calls.end if self._mark and not cut else ""
        if self._after:  # calls of the section have been passed on, and only the rest is left
            begin, text = "", text.strip(BLANKS)
            text = text[: len(text) - overlap(text, calls.end)].rstrip(BLANKS) if cut else text
            if self._after == "list":
                text = text.removeprefix("]").lstrip(BLANKS)
            if not text.startswith(",") or self._after != "list":
                yield from (Fragment("text", text + end),) if text and not self._only else ()
                return
        section = "[" + text[1:] if self._after else text
        found = calls_in(section, calls, self._tools)
        if found is not None:
            yield from _whole(found)
        elif not cut:
            yield Fragment("text", begin + text + end)
        elif (begun := begun_call(section, calls)) is not None:
            yield from _begun(begun)


def _whole(calls: Seq[Call]) -> Iterator[Fragment]:
    for call in calls:
        yield from _begun(call)
        yield Fragment("called")


def _begun(call: Call) -> Iterator[Fragment]:
    yield Fragment("call", call.name)
    if call.arguments:
        yield Fragment("arguments", call.arguments)


def reasoning_opened(form: AnswerFormat, prompt: str) -> bool:
    """Whether a prompt, or its end, begins a section of reasoning."""
    return form.reasoning is not None and prompt.rstrip().endswith(form.reasoning.begin.rstrip())


def _first(text: str, marks: Seq[str], last: bool) -> tuple[int, str | None]:
    """The index of the first mark and the longest mark there.

    If there is none: the length of the text that certainly has none, and None.
    """
    found = min(((at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0), default=None)
    if last:
        return (found[0], found[2]) if found else (len(text), None)
    begun = min((len(text) - overlap(text, mark) for mark in marks), default=len(text))
    if found is None:
        return begun, None
    # A longer mark may begin at the same place as a shorter one, or before it.
    longer = any(
        mark.startswith(text[at:]) for mark in marks for at in range(found[0] + 1) if text[at:] != mark
    )
    return (found[0] if begun > found[0] else begun, None) if longer else (found[0], found[2])


def overlap(text: str, mark: str) -> int:
    """The length of the longest end of the text that is a proper beginning of the mark."""
    longest = min(len(mark) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
