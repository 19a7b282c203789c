"""What is wrong with a request, in one sentence: the place as the client wrote it, what belongs there, and
what was sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from nearfar.fallback_server.http.places import RequestPlace, place_of
from nearfar.fallback_server.http.words import ENTRY, IDLE, KIND, SHOWN, TYPES, printable, shown, words_of_all
from nearfar.suggestions import advised

Error = Mapping[str, Any]

_OF_TAGS = ("union_tag_invalid", "union_tag_not_found")
LONGEST = 200
"""The most characters of a place that an error shows."""
_WITHOUT_VALUE = ("missing", "union_tag_not_found", IDLE)
_OF_LENGTH = ("too_short", "too_long", "string_too_short", "string_too_long")


@dataclass(frozen=True)
class Fault:
    """What is wrong with a request: the place ("" for the whole request), what is wrong there, and the field
    to name in the error.
    """

    where: str
    what: str
    param: str | None

    @property
    def message(self) -> str:
        """The fault as one sentence."""
        return _sentence(self.where, self.what)

    @property
    def outside(self) -> str:
        """The fault as one sentence that names the field alone, not the place in it."""
        return _sentence(self.param if self.where and self.param else self.where, self.what)


def fault_of(errors: Sequence[Error], model: type[BaseModel] | None) -> Fault:
    """Return the fault that explains pydantic's errors best. Of a union's errors that is one of our own, else
    the most deeply nested one. `model`: the model of the request.
    """
    found = [_at_its_tag(error, place_of(model, error["loc"])) for error in errors]
    error, place = max(found, key=lambda one: (one[0]["type"] == "value_error", len(one[1].parts)))
    same = [other for other, there in found if there.parts == place.parts]
    # An error about a value's range or length says more than another member's error about its type.
    best = [each for each in same if each["type"] not in TYPES]
    if error["type"] in TYPES and best:
        error, same = best[0], best
    if error["type"] == "extra_forbidden":
        return _unknown(place, model)
    # An error that concerns several fields has no place, but may name one of them.
    param = place.param or error.get("ctx", {}).get("param")
    message = words_of_all(same if error["type"] in TYPES else [error])
    message = f"{message}{_not(error, message)}"
    return Fault(printable(place.text[:LONGEST]), message, param)


def _sentence(where: str, what: str) -> str:
    """Put the place before the words, unless they begin with it."""
    return what if not where or what.startswith(f"{where} ") else f"{where}: {what}"


def _at_its_tag(error: Error, place: RequestPlace) -> tuple[Error, RequestPlace]:
    """Move an error about a union's tag to the field that has the tag, or to the value if that is not an
    object; and an error about the type of a list's first element to that element.
    """
    given = error.get("input")
    if error["type"] == KIND and isinstance(given, list) and given:
        entry = {**error, "msg": error["ctx"][ENTRY], "input": given[0]}
        return entry, RequestPlace((*place.parts, 0), place.holder)
    if error["type"] not in _OF_TAGS:
        return error, place
    field = error["ctx"]["discriminator"].strip("'()")
    if not isinstance(given, dict):
        return {**error, "type": "model_type"}, place
    return {**error, "input": given.get(field)}, RequestPlace((*place.parts, field), place.holder)


def _unknown(place: RequestPlace, model: type[BaseModel] | None) -> Fault:
    """Describe an unknown field, with the field of the same object that may be meant."""
    holder = place.holder or model
    known = {} if holder is None else holder.model_fields
    names = [field.alias or name for name, field in known.items()]
    meant = advised([str(place.parts[-1])], names)
    text = place.text[:SHOWN]
    name = text if text.strip() and text.isprintable() else shown(text)
    return Fault("", f"unknown field {name}{meant}", place.param)


def _not(error: Error, message: str) -> str:
    """The end of a message: the given value, where it helps."""
    kind, value = error["type"], error.get("input")
    if kind in _WITHOUT_VALUE:
        return ""
    if kind in _OF_LENGTH:
        return "" if not value else f", not {len(value):,}"
    said = shown(value)
    if isinstance(value, dict | list | str) and said in message:
        return ""
    # Our own errors are about the contents of a list or an object, which has the right type.
    return "" if kind == "value_error" and isinstance(value, dict | list) else f", not {said}"
