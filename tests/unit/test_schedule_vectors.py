"""The Python scheduler plans the launches of tests/vectors/schedule, like the TypeScript one
(web/test/schedule-vectors.test.ts).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.schedule_vectors import FILE, Replay

SCENARIOS = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario["name"])
def test_a_script_gives_the_launches(scenario: dict[str, Any]) -> None:
    replay = Replay(scenario["config"])
    for number, entry in enumerate(scenario["script"]):
        assert replay.run(entry) == entry, f"entry {number}"
