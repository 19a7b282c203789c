"""Narrows the keywords of a JSON schema that apply to one type."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from typing import Any

from nearfar.edge_runtime.grammars.patterns import slow, why_not
from nearfar.errors import RequestError
from nearfar.format.keywords import OF_TYPE, TYPES
from nearfar.step.config import show

Schema = dict[str, Any]
MOST_WHOLE = 10**18
"""The largest whole number in bounds: both llguidance and xgrammar enforce it, and both reject some numbers
at 2**63.
"""
MOST_NUMBER = 10**15
LEAST_NUMBER = 1e-15
"""The least distance from 0 of bounds that are not integers; MOST_NUMBER is the largest. llguidance rejects
them from 1e18 on, and near 0 from 1e-300 on.
"""
_LOWS = ("minimum", "exclusiveMinimum")


class TypedKeywords(ABC):
    """Narrows the keywords of one type; the subclass walks over the schema."""

    @abstractmethod
    def _error(self, place: str, what: str) -> RequestError: ...

    @abstractmethod
    def _drop(self, place: str, keyword: str, why: str = "no grammar can enforce it") -> None:
        """Refuse a keyword if the schema is strict; otherwise it is left out."""

    @abstractmethod
    def _schema(self, schema: Any, place: str) -> Schema: ...

    @abstractmethod
    def _each(self, schemas: Any, place: str) -> Schema: ...

    @abstractmethod
    def _list(self, schemas: Any, place: str) -> list[Schema]: ...

    def _types(self, value: Any, place: str) -> list[str]:
        types = value if isinstance(value, list) else [value]
        if not types or any(kind not in TYPES for kind in types):
            raise self._error(place, f"type {show(value)} must be one or several of {', '.join(TYPES)}")
        return [kind for kind in types if not (kind == "integer" and "number" in types)]

    def _typed(self, known: Schema, place: str) -> Schema:
        """Narrow a schema of one or several types with their keywords.

        A schema without a type gets the types that its keywords apply to.
        """
        spoken = [kind for kind, keys in OF_TYPE.items() if any(key in known for key in keys)]
        if "type" not in known and not spoken:
            return {}
        types = self._types(known["type"], place) if "type" in known else spoken
        made: Schema = {"type": types[0] if len(types) == 1 else types}
        for kind in types:
            own = {
                key: known[key]
                for key in OF_TYPE.get("number" if kind == "integer" else kind, ())
                if key in known
            }
            if own:
                made |= getattr(self, f"_{kind}")(own, place)
        return made

    def _string(self, own: Schema, place: str) -> Schema:
        pattern = own.get("pattern")
        own |= self._counts(own, ("minLength", "maxLength"), place)
        if len(own) > 1:
            # beside other keywords the format is only an annotation, because xgrammar would ignore the other
            # keywords
            own.pop("format", None)
        if pattern is not None:
            why = why_not(pattern)
            if why is None and len(own) > 1:
                why = "it cannot be enforced together with minLength or maxLength"
            if why is not None:
                self._drop(place, "pattern", why)
                del own["pattern"]
        if own.keys() & {"minLength", "maxLength"}:
            # Lengths become a pattern, because xgrammar allows control characters in strings of a bounded
            # length.
            low, high = own.pop("minLength", 0), own.pop("maxLength", None)
            if high is not None and high < low:
                raise self._error(place, f"minLength {low} is greater than maxLength {high}")
            own["pattern"] = f"^.{{{low},{'' if high is None else high}}}$"
        return own

    def _number(self, own: Schema, place: str) -> Schema:
        self._numbers(own, place)
        self._within(own, MOST_NUMBER, place)
        for key, value in own.items():  # a bound next to 0 is moved inwards: to 0, or to the least distance
            if 0 < abs(value) < LEAST_NUMBER:
                inwards = (value > 0) == (key in _LOWS)
                own[key] = math.copysign(LEAST_NUMBER, value) if inwards else 0
        return own

    def _numbers(self, own: Schema, place: str) -> None:
        for key, value in own.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise self._error(place, f"{key} must be a number, not {show(value)}")

    def _within(self, own: Schema, most: int, place: str) -> None:
        """Move bounds beyond ±`most` inwards; refuse a bound that leaves no value within."""
        for key in [key for key in own if abs(own[key]) > most]:
            low = key in _LOWS
            if (own[key] > 0) == low:
                self._drop(place, key, f"numbers beyond {most:.0e} cannot be told apart")
                del own[key]
            else:
                own[key] = -most if low else most

    def _integer(self, own: Schema, place: str) -> Schema:
        """Round the bounds of whole numbers to whole numbers."""
        self._numbers(own, place)
        low = [math.ceil(own["minimum"])] if "minimum" in own else []
        low += [math.floor(own["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in own else []
        high = [math.floor(own["maximum"])] if "maximum" in own else []
        high += [math.ceil(own["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in own else []
        if low and high and max(low) > min(high):
            raise self._error(place, f"no whole number is at least {max(low)} and at most {min(high)}")
        made = {"minimum": max(low)} if low else {}
        made |= {"maximum": min(high)} if high else {}
        self._within(made, MOST_WHOLE, place)
        return made

    def _array(self, own: Schema, place: str) -> Schema:
        own |= self._counts(own, ("minItems", "maxItems"), place)
        others = own.pop("additionalItems", None)
        if isinstance(own.get("items"), list):  # a tuple, up to draft 2019-09
            own["prefixItems"] = own.pop("items")
            if others is not None:
                own["items"] = others
            if not own["prefixItems"]:
                del own["prefixItems"]
        if own.pop("uniqueItems", False) and own.get("maxItems", 2) > 1:
            self._drop(place, "uniqueItems")
        self._unevaluated(own, "unevaluatedItems", "items", place)
        if own.get("minItems", 0) > len(own.get("prefixItems", ())):
            own.setdefault("items", {})
        if "prefixItems" in own:
            own["prefixItems"] = self._list(own["prefixItems"], f"{place}/prefixItems")
        if isinstance(own.get("items"), dict):
            own["items"] = self._schema(own["items"], f"{place}/items")
        return own

    def _object(self, own: Schema, place: str) -> Schema:
        own |= self._counts(own, ("minProperties", "maxProperties"), place)
        self._unevaluated(own, "unevaluatedProperties", "additionalProperties", place)
        if own.get("minProperties") and not own.keys() & {"properties", "patternProperties", "propertyNames"}:
            own.setdefault("additionalProperties", True)
        if isinstance(own.get("additionalProperties"), dict):
            own["additionalProperties"] = self._schema(
                own["additionalProperties"], f"{place}/additionalProperties"
            )
        if "properties" in own:
            own["properties"] = self._each(own["properties"], f"{place}/properties")
        if "patternProperties" in own:
            self._pattern_properties(own, place)
        if "propertyNames" in own:
            self._property_names(own, place)
        if "required" in own:
            self._required(own, place)
        if own.get("minProperties", 0) > 1 and own.get("additionalProperties", False) is not False:
            # The same name twice would count as two properties.
            self._drop(place, "minProperties", "with additionalProperties it is only enforced up to 1")
            del own["minProperties"]
        return own

    def _unevaluated(self, own: Schema, keyword: str, others: str, place: str) -> None:
        """Turn a false `keyword` (unevaluated…) into a false `others`: all that is described is in the same
        schema.
        """
        value = own.pop(keyword, True)
        if not isinstance(value, bool):
            self._drop(place, keyword, "only true and false are taken")
        elif not value and others not in own:
            own[others] = False

    def _required(self, own: Schema, place: str) -> None:
        """Describe required properties that have no schema: xgrammar requires only described ones."""
        names = own["required"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self._error(place, "required must be a list of names")
        missing = [name for name in dict.fromkeys(names) if name not in own.get("properties", {})]
        if not missing:
            return
        others = own.get("additionalProperties", True)
        why = f"the property {missing[0]!r:.60} is not among the properties"
        if others is False and "patternProperties" not in own:  # no value fits the schema
            raise self._error(
                place, f"'required': {why}, and additionalProperties allows no other: add it there"
            )
        if "patternProperties" in own or "propertyNames" in own:
            self._drop(place, "required", why)
            own["required"] = [name for name in names if name not in missing]
            return
        described = {name: {} if others is True else others for name in missing}
        own["properties"] = {**own.get("properties", {}), **described}

    def _property_names(self, own: Schema, place: str) -> None:
        """Turn rules for names into properties: of a list of names, or of a pattern. zod writes them for
        every record.
        """
        names = own.pop("propertyNames")
        if names is True or not self._limits_names(made := self._schema(names, f"{place}/propertyNames")):
            return
        if "properties" in own or "patternProperties" in own:
            self._drop(
                place, "propertyNames", "it cannot be enforced together with properties or patternProperties"
            )
            return
        others = own.get("additionalProperties", True)
        value = {} if others is True else others
        if "enum" in made or "string" not in _listed(made.get("type", "string")):
            listed = [name for name in made.get("enum", ()) if isinstance(name, str)]
            known = {} if value is False else {name: value for name in listed}
            own |= {"properties": known, "additionalProperties": False}
        elif made.keys() <= {"type", "pattern"}:
            own.pop("additionalProperties", None)
            own |= {"properties": {}, "additionalProperties": False} if value is False else {}
            if value is not False:
                own["patternProperties"] = {made["pattern"]: value}
        else:
            self._drop(place, "propertyNames", "only names of a list, a pattern or a length can be enforced")

    def _limits_names(self, names: Schema) -> bool:
        """Whether a narrowed schema forbids any name at all."""
        return not names.keys() <= {"type"} or "string" not in _listed(names.get("type", "string"))

    def _pattern_properties(self, own: Schema, place: str) -> None:
        patterns = own["patternProperties"]
        if not isinstance(patterns, dict):
            raise self._error(place, "patternProperties must be an object of schemas")
        why = next((reason for pattern in patterns if (reason := why_not(pattern))), None)
        if why is None and len(patterns) > 1:
            why = "only one pattern can be enforced"
        if why is None and own.get("additionalProperties", False) is not False:
            why = "it cannot be enforced together with additionalProperties"
        if why is None and own.get("properties"):
            why = next((reason for pattern in patterns if (reason := slow(pattern))), None)
        if why is None and any(
            re.search(pattern, name) for pattern in patterns for name in own.get("properties", ())
        ):
            why = "a property that is described has a name of this pattern"
        if why is not None:
            self._drop(place, "patternProperties", why)
            del own["patternProperties"]
        else:
            own["patternProperties"] = self._each(patterns, f"{place}/patternProperties")

    def _counts(self, own: Schema, keys: tuple[str, ...], place: str) -> Schema:
        """Check that counts are whole numbers, which JSON may write as 3.0."""
        for key in keys:
            value = own.get(key, 0)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or value < 0
                or value != int(value)
            ):
                raise self._error(place, f"{key} must be a whole number, not {show(value)}")
        return {key: int(own[key]) for key in keys if key in own}


def _listed(types: Any) -> list[Any]:
    return types if isinstance(types, list) else [types]
