"""The strict rules of the decision hold in every state, and its parts keep their guarantees."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any, get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from nearfar.remote.breaker import Breaker
from nearfar.routing.calibration import Threshold, limit_for
from nearfar.routing.confidence import Monitor, Token, entropy
from nearfar.routing.decision import cost_of, decide
from nearfar.routing.ledger import REMEMBERED, Ledger
from nearfar.routing.policy import BreakerOptions, MonitorOptions, Policy, RetryOptions
from nearfar.routing.retry import RetryBudget, backoff
from nearfar.routing.types import (
    FEATURES,
    MODES,
    BreakerState,
    CloudState,
    Conversation,
    DeviceState,
    RouteRequest,
)

maybe = lambda strategy: st.none() | strategy  # noqa: E731
tokens = st.integers(0, 5000)
share = st.floats(0, 1)
seconds = st.floats(0, 100)
speed = maybe(st.floats(0, 1e5))
features = st.sets(st.sampled_from(FEATURES)).map(tuple)
flag = maybe(st.booleans())

requests = st.builds(
    RouteRequest,
    tokens,
    st.integers(1, 5000),
    maybe(tokens),
    st.sets(st.sampled_from(FEATURES), max_size=2).map(tuple),
    maybe(share),
    maybe(st.sampled_from(MODES)),
    st.booleans(),
    st.builds(Conversation, maybe(st.sampled_from(["device", "cloud"])), tokens, tokens, st.floats(0, 1e5)),
)
devices = st.builds(
    DeviceState,
    st.booleans(),
    maybe(st.just("lost")),
    tokens,
    tokens,
    features,
    speed,
    speed,
    seconds,
    maybe(share),
    flag,
    flag,
)
clouds = st.builds(
    CloudState,
    st.booleans(),
    maybe(st.just("offline")),
    st.sampled_from(get_args(BreakerState)),
    st.just(0.0) | seconds,
    maybe(tokens),
    features,
    maybe(seconds),
    seconds,
    speed,
    speed,
    flag,
    st.floats(0, 100),
    st.floats(0, 100),
)
policies = st.builds(
    Policy,
    mode=st.sampled_from(MODES),
    difficulty_threshold=share,
    ttft=maybe(seconds),
    completion=maybe(seconds),
    battery_floor=share,
    budget_conversation=maybe(st.floats(0, 1e5)),
    budget_day=maybe(st.floats(0, 1e5)),
    budget_unit=st.sampled_from(["tokens", "money"]),
    spent_day=st.floats(0, 1e5),
    sticky_seconds=seconds,
)


@settings(max_examples=1000)
@given(requests, devices, clouds, policies)
def test_hard_rules(request: RouteRequest, device: DeviceState, cloud: CloudState, policy: Policy) -> None:
    made = decide(request, device, cloud, policy)
    assert made == decide(request, device, cloud, policy)
    mode = "device_only" if request.private else request.mode or policy.mode
    sides = {made.route, made.fallback} - {None}
    needed = request.prompt_tokens + request.max_tokens
    wanted = set(request.features)
    if mode == "device_only":
        assert "cloud" not in sides
    if mode == "cloud_only":
        assert "device" not in sides
    if "device" in sides:
        assert device.available
        assert needed <= min(device.context, device.free_kv_tokens)
        assert wanted <= set(device.features)
    if "cloud" in sides:
        assert cloud.available
        assert cloud.breaker != "open"
        assert cloud.retry_after == 0
        assert cloud.context is None or needed <= cloud.context
        assert wanted <= set(cloud.features)
        if mode != "cloud_only":
            assert policy.budget_day is None or policy.spent_day + made.cost <= policy.budget_day
            spent = request.conversation.spent + made.cost
            assert policy.budget_conversation is None or spent <= policy.budget_conversation
    assert made.cost == cost_of(request.prompt_tokens, request.max_tokens, cloud, policy)
    assert made.route != made.fallback or made.route is None
    assert made.route is not None or made.fallback is None
    assert made.reasons, "every decision says why"
    assert not made.degraded or made.route == "device"
    if made.route is None:
        blocked = {reason.side for reason in made.reasons}
        assert blocked == {"device", "cloud"}, "nowhere to go: both sides say why"


@given(requests, devices, clouds, policies)
def test_a_side_that_is_able_is_used(
    request: RouteRequest, device: DeviceState, cloud: CloudState, policy: Policy
) -> None:
    """A request that may go anywhere always has a route if the device can take it."""
    able = replace(device, available=True, context=20000, free_kv_tokens=20000, features=FEATURES)
    anywhere = replace(request, mode="auto")
    assert decide(anywhere, able, cloud, policy).route is not None


@given(requests, devices, clouds, policies, st.floats(0, 1))
def test_more_difficulty_never_brings_a_prompt_back(
    request: RouteRequest, device: DeviceState, cloud: CloudState, policy: Policy, more: float
) -> None:
    less = min(request.difficulty or 0.0, more)
    easy, hard = replace(request, difficulty=less), replace(request, difficulty=more)
    if decide(easy, device, cloud, policy).reasons[0].code == "hard":
        assert decide(hard, device, cloud, policy).route == decide(easy, device, cloud, policy).route


@given(
    st.lists(
        st.tuples(st.sampled_from(["begin", "ok", "fail", "leave", "wait", "hold"]), st.floats(0.1, 20)),
        max_size=60,
    )
)
def test_the_breaker_lets_one_probe_at_a_time_through(events: list[tuple[str, float]]) -> None:
    breaker, now = Breaker(BreakerOptions(failures=2, seconds=5, max_seconds=20)), 0.0
    under_way: list[Any] = []
    for event, amount in events:
        now += amount if event == "wait" else 0.0
        if event == "begin":
            allowed, state = breaker.allows(now), breaker.state(now)
            given = breaker.begin(now)
            assert (given is not None) == allowed
            assert given != "request" or state == "closed"
            under_way += [given] if given else []
        elif event == "hold":
            breaker.hold(now, amount)
            assert not breaker.allows(now)
        elif under_way and event != "wait":
            given = under_way.pop(0)
            if event == "ok":
                breaker.success(given)
            elif event == "fail":
                breaker.failure(now, given)
            else:
                breaker.abandoned(given)
        assert under_way.count("probe") <= 1
        assert breaker.retry_after(now) >= 0
        if not under_way:
            assert breaker.allows(now + breaker.retry_after(now) + 1e-6), "no state is for ever"


@given(st.integers(0, 9), st.floats(0, 1, exclude_max=True), maybe(st.floats(0, 60)))
def test_a_wait_is_bounded_and_honours_retry_after(attempt: int, drawn: float, after: float | None) -> None:
    options = RetryOptions()
    wait = backoff(attempt, drawn, after, options)
    if wait is not None:
        assert attempt < options.attempts
        assert (after or 0.0) <= wait <= options.max_wait


@given(st.lists(st.booleans(), max_size=300))
def test_retries_stay_under_their_share(events: list[bool]) -> None:
    options = RetryOptions(ratio=0.2, burst=3)
    budget, made, retried = RetryBudget(options), 0, 0
    for retry in events:
        if retry:
            retried += budget.withdraw()
        else:
            budget.request()
            made += 1
    assert retried <= options.burst + options.ratio * made + 1e-9


@given(st.sampled_from([0.1, 0.3, 0.7]), st.integers(0, 10**6))
@settings(max_examples=20)
def test_the_threshold_finds_its_share(target: float, seed: int) -> None:
    threshold, rng = Threshold(target, 0.5), random.Random(seed)
    went = 0
    for index in range(2000):
        difficulty = rng.random() ** 2
        went += index >= 1000 and difficulty >= threshold.value
        threshold.observe(difficulty)
    assert abs(went / 1000 - target) < 0.08


@given(st.lists(st.floats(-10, 0), min_size=1, max_size=50), share)
def test_a_limit_lets_no_more_than_its_share_go(values: list[float], part: float) -> None:
    limit = limit_for(values, part)
    assert sum(value < limit for value in values) <= part * len(values)


@given(st.lists(st.floats(-30, 0), min_size=1, max_size=20))
def test_entropy_is_finite_and_not_negative_for_probabilities(top: list[float]) -> None:
    total = math.log(sum(math.exp(value) for value in top))
    normal = [value - max(total, 0.0) for value in top]
    assert -1e-9 <= entropy(normal) <= math.log(len(top) + 1) + 1e-9


@given(st.lists(st.tuples(st.sampled_from("abc"), maybe(st.floats(-9999, 0))), max_size=80))
def test_the_monitor_says_nothing_when_nothing_is_watched(answer: list[tuple[str, float | None]]) -> None:
    monitor = Monitor(MonitorOptions(logprob=None, entropy=None, repeats=None))
    assert not any(
        monitor.push(Token(text, logprob, (logprob,) if logprob else ())) for text, logprob in answer
    )


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", None]), st.integers(0, 100), share, st.booleans()), max_size=40
    )
)
def test_the_ledger_counts_every_cost_once(calls: list[tuple[str | None, int, float, bool]]) -> None:
    ledger, day = Ledger(), "2026-01-01"
    expected, pending = 0.0, []
    for name, cost, part, at_once in calls:
        number = ledger.reserve(name, cost)
        pending.append((number, cost * part, cost))
        expected += cost
        assert ledger.spent_day(day) >= cost
        if not at_once:
            for waiting, actual, reserved in pending:
                ledger.settle(waiting, day, actual)
                ledger.settle(waiting, day, actual)
                expected += actual - reserved
            pending = []
        assert abs(ledger.spent_day(day) - expected) < 1e-6
    restored = Ledger.restored(ledger.as_json())
    assert restored.as_json() == ledger.as_json()


def test_the_ledger_forgets_the_oldest_conversations() -> None:
    ledger = Ledger()
    for number in range(REMEMBERED + 5):
        ledger.settle(ledger.reserve(f"c{number}", 1), "d", 1)
        ledger.settle(ledger.reserve("kept", 1), "d", 1)
    assert len(ledger.as_json()["conversations"]) == REMEMBERED
    assert ledger.spent_conversation("kept") == REMEMBERED + 5
    assert ledger.spent_conversation("c0") == 0
