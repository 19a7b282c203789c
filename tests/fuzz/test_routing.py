"""Policies and hints from callers and files give a policy or hints of the right types, or one of
our errors.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nearfar.errors import RequestError
from nearfar.routing.policy import Policy, RetryOptions
from nearfar.routing.request import Hints, hints_of
from nearfar.routing.types import MODES
from tests.fuzz.effort import effort

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(MODES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from([each.name for each in fields(Policy)]) | st.text(max_size=8)
GROUP = st.dictionaries(
    st.sampled_from([each.name for each in fields(RetryOptions)] + ["window", "logprob"]), JSON, max_size=4
)
HINTS = st.dictionaries(
    st.sampled_from(["mode", "private", "conversation", "expected_tokens", "privat"]), JSON, max_size=3
)
MESSAGE = st.dictionaries(
    st.sampled_from(["role", "content", "x_nearfar", "private", "x_y"]), JSON | HINTS, max_size=3
)


@given(JSON | st.dictionaries(NAMES, JSON | GROUP, max_size=5))
@effort(300)
def test_a_policy_is_one_of_the_right_types_or_is_refused(data: Any) -> None:
    try:
        policy = Policy.parse(data)
    except RequestError:
        return
    assert Policy.parse(asdict(policy)) == policy
    assert policy.timeouts.connect >= 0


@given(
    JSON | st.lists(MESSAGE, max_size=3),
    JSON | HINTS,
    JSON | st.fixed_dictionaries({"x_nearfar": JSON | HINTS}),
)
@effort(300)
def test_hints_are_read_or_refused(messages: Any, own: Any, extra: Any) -> None:
    try:
        asked = hints_of(messages, {"x_nearfar": own, "extra_body": extra})
    except RequestError:
        return
    assert isinstance(asked.hints, Hints)
    private = [
        place.get("private")
        for place in (own, (extra or {}).get("x_nearfar"), *[m.get("x_nearfar") for m in messages])
        if place
    ]
    assert asked.hints.private == (True in private)
    assert not any("x_nearfar" in message for message in (*asked.messages, asked.params))
