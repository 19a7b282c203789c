"""Writes the vectors of scenarios.py with Python's results: python -m tests.vectors.routing.record.

Read the diff before committing.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from typing import Any

from nearfar.edge_runtime.openai.knowledge import ANSWERS, SURE
from nearfar.routing.fitted import FittedRouter, row_tokens
from nearfar.routing.policy import Policy
from tests.support.handover_vectors import replay
from tests.support.routing_vectors import MACHINES, VECTORS, decision
from tests.vectors.routing.handover_scripts import SCRIPTS
from tests.vectors.routing.routers import ROUTER, VOCABULARIES, cases, refused
from tests.vectors.routing.scenarios import DECISIONS, machines, random_case

RANDOM_CASES = 150


def line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def write(name: str, items: list[str]) -> None:
    (VECTORS / f"{name}.json").write_text("[\n" + ",\n".join(items) + "\n]\n", encoding="utf-8")


def record_decisions(name: str, cases: list[dict[str, Any]]) -> None:
    """Write one case for each line."""
    write(name, [line({**case, "decision": decision(case)}) for case in cases])


def record_router() -> None:
    """Write the router; one line for each prompt with its probability and verdict, and one for each rejected
    change.
    """
    made = FittedRouter.parse(ROUTER)
    items = []
    for case in cases():
        doubt = made.doubt(case["knowledge"], [tuple(each) for each in case["first"]], case["ended"])
        found = {"gain": made.gain(case["knowledge"]), "doubt": None if doubt is None else asdict(doubt)}
        items.append(line({**case, **found}))
    sure = {"question": SURE, "answers": ANSWERS}
    rows = {size: row_tokens(size) for size in VOCABULARIES}
    parts = [f'{{"router": {line(ROUTER)}', f'"sure": {line(sure)}', f'"row_tokens": {line(rows)}']
    parts.append(f'"asked_tokens": {line(made.row_tokens)}')
    for name, each in (("cases", items), ("refused", [line(change) for change in refused()])):
        parts.append(f'"{name}": [\n' + ",\n".join(each) + "\n]")
    text = ",\n".join(parts) + "}\n"
    (VECTORS / "router.json").write_text(text, encoding="utf-8")


def record_machine(name: str, scenarios: list[dict[str, Any]]) -> None:
    """Write one step for each line."""
    items = []
    for scenario in scenarios:
        run = MACHINES[name](scenario["config"])
        steps = []
        for step in scenario["steps"]:
            result, state = run(step["op"], step["args"])
            steps.append("  " + line({**step, "result": result, "state": state}))
        head = f'{{"name": {line(scenario["name"])}, "config": {line(scenario["config"])}, "steps": ['
        items.append(head + "\n" + ",\n".join(steps) + "\n]}")
    write(name, items)


def record_handover(name: str, scripts: list[dict[str, Any]]) -> None:
    """Write one event for each line, with its actions."""
    items = []
    for script in scripts:
        actions, outcome = replay(script)
        steps = [f"  {line([event, done])}" for event, done in zip(script["events"], actions, strict=True)]
        head = (
            f'{{"name": {line(script["name"])}, "begin": {line(script["begin"])}, "rules": '
            f'{line(script["rules"])}, "steps": ['
        )
        items.append(head + "\n" + ",\n".join(steps) + f'\n], "outcome": {line(outcome)}}}')
    (VECTORS / "handover").mkdir(exist_ok=True)
    write(f"handover/{name}", items)


if __name__ == "__main__":
    (VECTORS / "policy.json").write_text(json.dumps(asdict(Policy()), indent=2) + "\n", encoding="utf-8")
    record_decisions("decision", DECISIONS)
    rng = random.Random(2026)
    record_decisions("decision_random", [random_case(number, rng) for number in range(RANDOM_CASES)])
    record_router()
    for machine, scenarios in machines().items():
        record_machine(machine, scenarios)
    for name, scripts in SCRIPTS.items():
        record_handover(name, scripts)
