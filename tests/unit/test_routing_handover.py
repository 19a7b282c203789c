"""The scripts of the hand-over, replayed on Python's table, and through the real client over two scripted
servers.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from nearfar.errors import NearfarError, RequestError
from nearfar.routing import AsyncHybridClient, Endpoint, Policy
from tests.support.handover_vectors import TABLES, load, parts_of, playable, replay
from tests.support.scripted import ScriptedServer

SCRIPTS = [(name, script) for name in TABLES for script in load(name)]
PLAYED = [script for _, script in SCRIPTS if playable(script)]


@pytest.mark.parametrize(
    "script", [script for _, script in SCRIPTS], ids=[f"{name}: {script['name']}" for name, script in SCRIPTS]
)
def test_script(script: dict[str, Any]) -> None:
    actions, outcome = replay({**script, "events": [event for event, _ in script["steps"]]})
    assert actions == [expected for _, expected in script["steps"]]
    assert outcome == script["outcome"]


@pytest.mark.parametrize("script", PLAYED, ids=[script["name"] for script in PLAYED])
async def test_script_through_the_client(script: dict[str, Any]) -> None:
    parts, rules = parts_of(script), script["rules"]
    # A busy machine is silent for a while, too: only scripts with a timeout wait for one.
    silence = 0.4 if any("timeout" in event.split() for event, _ in script["steps"]) else 20
    policy = Policy.parse({
        "mode": f"prefer_{script['begin']}", "after_cut": rules["after_cut"], "escalation": "off",
        "retry": {"base": 0.001, "before_fallback": rules["before_fallback"]},
        "timeouts": {"connect": 5, "first_token": silence, "between": silence},
    })  # fmt: skip
    with ScriptedServer(parts["device"]) as device, ScriptedServer(parts["cloud"]) as cloud:
        sides: dict[str, Any] = {
            "device": device.address,
            "cloud": Endpoint(cloud.address, model="m", context=999),
        }
        text, told, finish = "", None, None
        failed: NearfarError | None = None
        async with AsyncHybridClient(policy=policy, **sides) as client:
            try:
                more: dict[str, Any] = {} if rules["plain"] else {"response_format": {"type": "json_object"}}
                more |= {"logprobs": True} if any("logprobs" in event for event, _ in script["steps"]) else {}
                async for chunk in await client.chat.completions.create(
                    [{"role": "user", "content": "Go"}],
                    stream=True,
                    max_tokens=rules["max_tokens"],
                    min_tokens=1,
                    **more,
                ):
                    told = chunk.x_nearfar or told
                    for choice in chunk.choices:
                        text += choice.delta.content or ""
                        text += "x " * len(choice.delta.tool_calls or ())
                        finish = choice.finish_reason or finish
            except NearfarError as error:
                failed = error
            assert client.router._ledger.spent_day("another day") == 0, "a reservation was left behind"
    expected = script["outcome"]
    assert (failed is not None) == any("fail" in actions for _, actions in script["steps"])
    assert (text, finish) == ("x " * expected["shown"], expected["finish"])
    assert device.left + cloud.left == 0, "a side was not asked as often as it should be"
    if failed is not None:
        assert isinstance(failed, RequestError) == any(
            event.startswith("refused") for event, _ in script["steps"]
        )
    else:
        assert told is not None
        assert (told.path, told.degraded) == (expected["path"], expected["degraded"])
        assert [[reason.code, reason.side, reason.value] for reason in told.reasons[1:]] == expected[
            "reasons"
        ]


def test_enough_of_the_scripts_are_played() -> None:
    assert len(PLAYED) >= 15
    assert json.dumps([script["name"] for script in PLAYED]).count("finish") >= 3
