"""Strange JSON: values anywhere in a document are replaced, removed or repeated."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

STRANGE: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(
        [0, -1, 1, 2**31, 2**63, 10**12, 10**400, 0.5, 16.0, 1e-300, 1e308, "", "a", "..", "1e5", "false"]
    ),
    st.floats(),
    st.text(max_size=5),
    st.recursive(
        st.integers(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=5,
    ),
)
REMOVED = object()


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in a document, except the document itself."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [path] if path else []
    return found + [place for key, item in items for place in places(item, (*path, key))]


@st.composite
def mutants(draw: st.DrawFn, document: dict[str, Any], keys: tuple[str, ...] = ()) -> dict[str, Any]:
    """A copy with one to three changes, which may also add `keys` that the document lacks."""
    made = copy.deepcopy(document)
    for place in draw(
        st.lists(st.sampled_from([*places(document), *((key,) for key in keys)]), min_size=1, max_size=3)
    ):
        target: Any = made
        try:
            for key in place[:-1]:
                target = target[key]
            value = draw(STRANGE | st.just(REMOVED))
            if value is REMOVED:
                del target[place[-1]]
            else:
                target[place[-1]] = value
        except (LookupError, TypeError):  # an earlier change has removed the place
            continue
    return made
