"""A request under way is checked again when its text or its conversation becomes private: from then on
nothing of it goes to the cloud.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nearfar.errors import EngineError
from nearfar.routing import Policy
from nearfar.routing.request import hints_of
from nearfar.routing.router import Router
from nearfar.routing.run import HybridAnswer
from tests.support.hybrid import ASK, LOW, QUICK, Rig, lose_after

DIARY = "Dear diary, the word for my account is quokka, and nobody may know it."
CONVERSATION = {"conversation": "a"}
Became = Callable[[Router], None]


def by_conversation(router: Router) -> None:
    router._private.remember(router._private.marks([{"role": "user", "content": "Hi"}]), "a")


def by_text(router: Router) -> None:
    router._private.remember(router._private.marks([{"role": "user", "content": DIARY}]), None)


async def run(
    rig: Rig, became: Became, policy: Policy, before: Callable[[Router], Any], **options: Any
) -> tuple[Router, str]:
    """The router, and the text of an answer whose request became private after it was decided."""
    router = rig.client(policy, **options).router
    messages = [{"role": "user", "content": f"Is this true? {DIARY}"}]
    plan = await router.plan(hints_of(messages, {**ASK, "max_tokens": 24, "x_nearfar": CONVERSATION}))
    assert plan.private_by is None
    before(router)
    became(router)
    pieces = HybridAnswer(router, plan, streamed=True).pieces()
    return router, "".join([piece.text async for piece in pieces])


@pytest.mark.parametrize("became", [by_conversation, by_text])
@pytest.mark.parametrize(
    "policy",
    [
        replace(QUICK, escalation="continue", monitor=LOW),
        replace(QUICK, escalation="restart", hold_tokens=8, monitor=LOW),
        replace(QUICK, hedge_seconds=0.0),
        replace(QUICK, mode="prefer_cloud"),
    ],
    ids=["escalation by continuing", "escalation by starting over", "hedging", "decided for the cloud"],
)
async def test_the_device_goes_on(rig: Rig, became: Became, policy: Policy, tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    policy = replace(policy, record_text=True)
    _, text = await run(rig, became, policy, lambda _: None, records=records)
    assert text
    assert rig.proxy.connections == 0
    record = json.loads(records.read_text())
    assert record["request"]["private"]
    assert record["private_by"] in ("earlier", "quote")
    assert "quokka" not in records.read_text()


@pytest.mark.parametrize("became", [by_conversation, by_text])
async def test_the_device_is_lost(rig: Rig, became: Became) -> None:
    with pytest.raises(EngineError, match="the device failed"):
        await run(rig, became, QUICK, lambda _: lose_after(rig.device, 3))
    assert rig.proxy.connections == 0


async def test_the_cloud_is_not_tried_again(rig: Rig) -> None:
    rig.proxy.down = True

    def before(router: Router) -> None:
        def late() -> float:
            by_conversation(router)
            return 0.0

        router.random = late

    policy = replace(QUICK, mode="cloud_only")
    with pytest.raises(EngineError, match="the cloud failed"):
        await run(rig, lambda _: None, policy, before)
    assert rig.proxy.connections == 1


async def test_while_the_device_is_asked(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    router = rig.client(replace(QUICK, mode="prefer_cloud")).router
    states = router._states

    async def late(request: Any) -> Any:
        found = await states(request)
        by_conversation(router)
        return found

    monkeypatch.setattr(router, "_states", late)
    messages = [{"role": "user", "content": "Hello"}]
    plan = await router.plan(hints_of(messages, {**ASK, "x_nearfar": CONVERSATION}))
    assert (plan.decision.route, plan.private_by) == ("device", "earlier")
