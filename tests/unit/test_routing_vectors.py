"""The Python side passes the vectors that the TypeScript side passes too."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from nearfar.edge_runtime.openai.knowledge import ANSWERS, SURE
from nearfar.errors import RequestError
from nearfar.routing.fitted import FittedRouter, row_tokens
from nearfar.routing.policy import MonitorOptions, Policy, RetryOptions
from tests.support.routing_vectors import MACHINES, VECTORS, decision, same


def load(name: str) -> list[dict[str, Any]]:
    return list(json.loads((VECTORS / f"{name}.json").read_text(encoding="utf-8")))


@pytest.mark.parametrize("file", ["decision", "decision_random"])
def test_decisions(file: str) -> None:
    for case in load(file):
        assert same(decision(case), case["decision"]), case["name"]


@pytest.mark.parametrize("machine", MACHINES)
def test_machine(machine: str) -> None:
    for scenario in load(machine):
        run = MACHINES[machine](scenario["config"])
        for number, step in enumerate(scenario["steps"]):
            result, state = run(step["op"], step["args"])
            where = f"{scenario['name']}, step {number}: {step['op']} {step['args']}"
            assert same(result, step["result"]), f"{where}: {result}"
            assert same(state, step["state"]), f"{where}: {state}"


def test_a_fitted_router_judges_prompts_and_beginnings_of_answers() -> None:
    recorded = json.loads((VECTORS / "router.json").read_text(encoding="utf-8"))
    made = FittedRouter.parse(recorded["router"])
    for case in recorded["cases"]:
        doubt = made.doubt(case["knowledge"], [tuple(each) for each in case["first"]], case["ended"])
        assert same(made.gain(case["knowledge"]), case["gain"]), case
        assert same(None if doubt is None else asdict(doubt), case["doubt"]), case
    assert recorded["sure"] == {"question": SURE, "answers": list(ANSWERS)}
    assert list(made.row_tokens) == recorded["asked_tokens"]
    for size, tokens in recorded["row_tokens"].items():
        assert list(row_tokens(int(size))) == tokens, size
    for ended in (False, True):
        verdicts = {case["doubt"] is None for case in recorded["cases"] if case["ended"] == ended}
        assert verdicts == {True, False}
    for change in recorded["refused"]:
        with pytest.raises(RequestError, match="not a router") as raised:
            FittedRouter.parse({**recorded["router"], **change})
        assert raised.value.param == "router", change


def test_comparison_notices_differences() -> None:
    assert same({"a": [1, 2.0, None]}, {"a": [1.0, 2, None]})
    assert not any(
        same(*pair)
        for pair in [(1, 2), (True, 1), (None, 0), ({"a": 1}, {"b": 1}), ([1], [1, 2]), ("a", "b")]
    )


def test_the_policys_defaults_are_those_that_typescript_is_held_to() -> None:
    assert json.loads((VECTORS / "policy.json").read_text(encoding="utf-8")) == asdict(Policy())


@pytest.mark.parametrize("case", load("policy_refused"), ids=lambda case: json.dumps(case["policy"]))
def test_a_policy_that_makes_no_sense_is_refused_by_name(case: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as raised:
        Policy.parse(case["policy"])
    assert raised.value.param == case["param"]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"monitor": {"repeats": 3}}, "monitor"),
        ({"monitor": {"zz": 0}}, "monitor"),
        ({"monitor": 5}, "monitor"),
        ({"retry": {"attempts": -1}}, "retry"),
        ({"timeouts": None}, "timeouts"),
        ({"breaker": RetryOptions()}, "breaker"),
    ],
)
def test_a_policy_that_is_made_in_python_refuses_what_its_json_refuses(
    given: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as raised:
        Policy(**given)
    assert raised.value.param == param
    with pytest.raises(RequestError):
        replace(Policy(), **given)
    assert Policy(monitor=MonitorOptions(repeats=3)).monitor.repeats == 3
