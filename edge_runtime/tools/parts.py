"""Turns the text of one answer, as it arrives, into parts of a reply, with numbered and named calls."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nearfar.edge_runtime.tools.calls import call_id
from nearfar.edge_runtime.tools.reading import AnswerReader, Fragment


@dataclass(frozen=True)
class CallPart:
    """A part of a call: the first has id and name; later ones, with both empty, have its arguments piece by
    piece.
    """

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class AnswerPart:
    """Reasoning and text, or one part of a call: some clients do not add up two parts of one chunk."""

    text: str = ""
    reasoning: str = ""
    call: CallPart | None = None


class PartReader:
    """Numbers the calls of an answer."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self._index = -1
        self.called = 0
        """The number of complete calls."""

    def push(self, text: str) -> list[AnswerPart]:
        """The parts that become certain with this text."""
        return self._parts(self._reader.push(text))

    def finish(self, text: str, *, cut: bool) -> list[AnswerPart]:
        """The last parts of an answer, with its last text; `cut`: the model did not end it itself."""
        return self._parts([*self._reader.push(text), *self._reader.finish(cut=cut)])

    def _parts(self, fragments: list[Fragment]) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for one in fragments:
            last = parts[-1] if parts else AnswerPart()
            match one.kind:
                case "called":
                    self.called += 1
                case "call":
                    self._index += 1
                    parts.append(AnswerPart(call=CallPart(self._index, call_id(), one.text, "")))
                case "arguments" if last.call and not last.call.id:
                    parts[-1] = AnswerPart(call=replace(last.call, arguments=last.call.arguments + one.text))
                case "arguments":
                    parts.append(AnswerPart(call=CallPart(self._index, "", "", one.text)))
                case _:
                    before = parts.pop() if last.call is None and parts else AnswerPart()
                    parts.append(_longer(before, one))
        return parts


def _longer(part: AnswerPart, more: Fragment) -> AnswerPart:
    if more.kind == "reasoning":
        return replace(part, reasoning=part.reasoning + more.text)
    return replace(part, text=part.text + more.text)
