"""State that all requests of a client share: both sides, their breakers and speeds, budgets, the threshold,
conversations.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from nearfar.edge_runtime.openai.records import Usage
from nearfar.errors import EngineError, NearfarError, OverloadError, RequestError
from nearfar.remote.breaker import Breaker, Pass
from nearfar.routing.calibration import Threshold
from nearfar.routing.decision import cost_of, decide
from nearfar.routing.device import EngineDevice, Told
from nearfar.routing.difficulty import messages_to_prompt
from nearfar.routing.endpoint import EndpointSide
from nearfar.routing.fitted import FittedRouter, Judge
from nearfar.routing.handover import Outcome
from nearfar.routing.ledger import Ledger
from nearfar.routing.policy import Policy
from nearfar.routing.power import power
from nearfar.routing.privacy import Marks, PrivateTexts
from nearfar.routing.request import Asked, Hints, call_of, features_of
from nearfar.routing.retry import RetryBudget
from nearfar.routing.sides import SideCall, SideError, Size, estimate
from nearfar.routing.speed import Speeds
from nearfar.routing.store import Records, StateFile, StateWriter
from nearfar.routing.types import (
    CloudState,
    Conversation,
    DeviceState,
    Mode,
    PrivateBy,
    Reason,
    RouteDecision,
    RouteRequest,
    Side,
)

Device = EngineDevice | EndpointSide
Scorer = Callable[[str], float]
REMEMBERED = 1000
"""Most conversations whose last side is remembered."""


@dataclass(frozen=True)
class States:
    """Both sides at the moment of a decision, and the policy with its present costs and threshold."""

    device: DeviceState
    cloud: CloudState
    policy: Policy


@dataclass(frozen=True)
class RoutePlan:
    """A request with its decision. `would`: the decision without shadow mode. `private_by`: why it was
    private when it was decided; `marks`: the marks by which it may become private later.
    """

    id: str
    call: SideCall
    hints: Hints
    request: RouteRequest
    states: States
    decision: RouteDecision
    would: RouteDecision | None
    ticket: Ticket | None
    marks: Marks
    private_by: PrivateBy | None = None
    told: Told | None = None


@dataclass(eq=False)
class Ticket:
    """A call to one side under way, with what its breaker and the ledger need at its end."""

    side: Side
    given: Pass
    reservation: int | None
    ended: bool = False


@dataclass
class _Memory:
    """A conversation's last side, and how many of its tokens the cloud has seen and when."""

    last_route: Side | None = None
    cloud_tokens: int = 0
    cloud_time: float = 0.0


class Router:
    """Decides, admits and accounts, all on one event loop."""

    def __init__(
        self, device: Device | None, cloud: EndpointSide | None, policy: Policy, score: Scorer | None,
        state: Path | None, records: Path | None, clock: Callable[[], float] = time.monotonic,
        fitted: FittedRouter | Literal["record"] | None = None,
    ) -> None:  # fmt: skip
        if isinstance(fitted, FittedRouter):
            policy = replace(policy, difficulty_threshold=fitted.threshold)
        self.device, self.cloud, self.policy = device, cloud, policy
        self.retries = RetryBudget(policy.retry)
        self.records = Records(records)
        self.random = random.random
        self._score, self._clock, self._fitted = score, clock, fitted
        self._breakers = {"device": Breaker(policy.device_breaker), "cloud": Breaker(policy.breaker)}
        self._memory: OrderedDict[str, _Memory] = OrderedDict()
        file = StateFile(state)
        kept = file.load()
        self._state = StateWriter(file, self._kept)
        self._ledger = Ledger.restored(kept.get("ledger", {}))
        marks = None if state is None else state.with_name(state.name + ".private")
        self._private = PrivateTexts(marks, kept.get("private", ()))
        self._threshold: Threshold | None = None
        if policy.target_share is not None:
            self._threshold = Threshold.restored(
                kept.get("threshold", {}),
                policy.target_share,
                policy.difficulty_threshold,
                policy.calibration,
            )
        for side, name in ((device, "device"), (cloud, "cloud")):
            if side is not None and name in kept.get("speeds", {}):
                given = side.speeds.prefill_tps
                side.speeds = Speeds.restored(kept["speeds"][name])
                side.speeds.prefill_tps = given or side.speeds.prefill_tps

    def side(self, name: Side) -> Device:
        """Return one side, which must exist."""
        found = self.device if name == "device" else self.cloud
        assert found is not None
        return found

    async def plan(self, asked: Asked) -> RoutePlan:
        """Decide for a request and admit it. Raises an error with all reasons where neither side can take
        it.
        """
        messages, params, hints = asked.messages, asked.params, asked.hints
        marks = await asyncio.to_thread(self._private.marks, messages, params)
        private_by = self._private_by(marks, hints)
        call = call_of(messages, params, self.policy.default_max_tokens)
        mode = hints.mode or self.policy.mode
        size = await self._measure(call, mode)
        scored = mode == "auto" and private_by is None
        async with AsyncExitStack() as until_planned:
            told = await self._told(call) if scored else None
            if told is not None:
                until_planned.push_async_callback(told.release)
                self._check_told(told)
            difficulty = self._difficulty(messages, told) if scored else None
            request = RouteRequest(
                prompt_tokens=size.prompt,
                max_tokens=call.max_tokens,
                expected_tokens=hints.expected_tokens,
                features=features_of(messages, params),
                difficulty=difficulty,
                mode=hints.mode,
                conversation=self._conversation(hints.conversation, size),
            )
            request, states, private_by = await self._seen(request, marks, hints, private_by)
            decision, would = decide(request, states.device, states.cloud, states.policy), None
            if self._threshold is not None and difficulty is not None and private_by is None:
                self._threshold.observe(difficulty)
            if self.policy.shadow is not None:
                would, decision = decision, self._preferring(self.policy.shadow, request, states)
            name = f"d-{secrets.token_hex(8)}"
            plan = RoutePlan(
                name, call, hints, request, states, decision, would, None, marks, private_by, told
            )
            if decision.route is None:
                error = _refusal(decision)
                self.record(plan, {"error": type(error).__name__})
                raise error
            self.retries.request()
            until_planned.pop_all()  # now the run releases the prompt
            return replace(plan, ticket=self._ticket(plan, decision.route, decision.cost))

    def private_by(self, plan: RoutePlan) -> PrivateBy | None:
        """The reason why a request is private now; later requests may have made it private since its
        decision.
        """
        return plan.private_by or self._private_by(plan.marks, plan.hints)

    async def admit(self, plan: RoutePlan, side: Side) -> Ticket | None:
        """Let a side take over if it may now; everything is checked again. Returns None where it may not."""
        request = plan.request
        if plan.hints.conversation is not None:
            spent = self._ledger.spent_conversation(plan.hints.conversation)
            request = replace(request, conversation=replace(request.conversation, spent=spent))
        request, states, _ = await self._seen(request, plan.marks, plan.hints, self.private_by(plan))
        decision = self._preferring(side, request, states)
        return self._ticket(plan, side, decision.cost) if decision.route == side else None

    def leave(
        self,
        ticket: Ticket,
        plan: RoutePlan,
        outcome: Outcome,
        used: Usage | None,
        error: SideError | None = None,
    ) -> float:
        """Account for a call that ended, and return its cost. `used`: the charged tokens; None: no charge."""
        if ticket.ended:
            return 0.0
        ticket.ended = True
        breaker, now = self._breakers[ticket.side], self._clock()
        if outcome == "ok":
            breaker.success(ticket.given)
        elif outcome == "failed" and not (error is not None and (error.busy or error.code == "private")):
            breaker.failure(now, ticket.given)
        else:
            breaker.abandoned(ticket.given)
        if error is not None and (error.busy or error.retry_after):
            breaker.hold(now, error.retry_after if error.retry_after is not None else 1.0)
        if ticket.reservation is None:
            return 0.0
        cost = 0.0 if used is None else self.price(plan, used)
        self._ledger.settle(ticket.reservation, _today(), cost)
        return cost

    def price(self, plan: RoutePlan, used: Usage) -> float:
        """Return the cloud's price of these tokens."""
        return cost_of(used.prompt_tokens, used.completion_tokens, plan.states.cloud, self.policy)

    def remember(self, plan: RoutePlan, route: Side, tokens: int, answer: str) -> None:
        """Record an answer: the conversation's last side, and the state to keep."""
        if answer and self.private_by(plan) is not None:
            said = self._private.marks([{"role": "assistant", "content": answer}])
            self._private.remember(said, None)
        if (name := plan.hints.conversation) is not None:
            memory = self._memory.setdefault(name, _Memory())
            self._memory.move_to_end(name)
            memory.last_route = route
            if route == "cloud":
                memory.cloud_tokens, memory.cloud_time = tokens, self._clock()
            while len(self._memory) > REMEMBERED:
                self._memory.popitem(last=False)
        self._state.changed()

    def _kept(self) -> dict[str, Any]:
        """The state to keep: costs, threshold and speeds."""
        sides = {"device": self.device, "cloud": self.cloud}
        return {
            "ledger": self._ledger.as_json(),
            "threshold": self._threshold.as_json() if self._threshold is not None else {},
            "speeds": {name: side.speeds.as_json() for name, side in sides.items() if side is not None},
        }

    def record(self, plan: RoutePlan, outcome: Mapping[str, Any], answer: str | None = None) -> None:
        """Write a decision record. It has texts only where the policy allows them, and never those of a
        private request.
        """
        states, private_by = plan.states, self.private_by(plan)
        line: dict[str, Any] = {
            "id": plan.id,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request": asdict(_made_private(plan.request, private_by)),
            "private_by": private_by,
            "device": asdict(states.device),
            "cloud": asdict(states.cloud),
            "policy": {
                "mode": states.policy.mode,
                "difficulty_threshold": states.policy.difficulty_threshold,
            },
            "decision": plan.decision.as_json(),
            "would": plan.would.as_json() if plan.would else None,
            "outcome": outcome,
        }
        if plan.told is not None and private_by is None:
            line |= plan.told.as_json()
        if self.policy.record_text and private_by is None:
            line["text"] = {"messages": [dict(message) for message in plan.call.messages], "answer": answer}
        self.records.add(line)

    async def close(self) -> None:
        """Save the state and close both sides."""
        await self._state.settled()
        for side in (self.device, self.cloud):
            if side is not None:
                await side.close()

    def _private_by(self, marks: Marks, hints: Hints) -> PrivateBy | None:
        """The reason why a request is private now. Remembers its texts as private, or its conversation if it
        only quotes a private text.
        """
        found: PrivateBy | None = (
            "request" if hints.private else self._private.known(marks, hints.conversation)
        )
        if found == "quote":
            self._private.remember_conversation(hints.conversation)
        elif found is not None:
            self._private.remember(marks, hints.conversation)
        return found

    def _ticket(self, plan: RoutePlan, side: Side, cost: float) -> Ticket:
        """Make the ticket of a call. Called without an await after the decision, so that the decision still
        holds.
        """
        given = self._breakers[side].begin(self._clock())
        reservation = self._ledger.reserve(plan.hints.conversation, cost) if side == "cloud" else None
        return Ticket(side, given or "request", reservation)

    def _preferring(self, side: Side, request: RouteRequest, states: States) -> RouteDecision:
        """Decide as if that side were preferred, as far as the request's mode leaves a choice."""
        mode: Mode = request.mode or states.policy.mode
        if mode not in ("device_only", "cloud_only"):
            mode = "prefer_device" if side == "device" else "prefer_cloud"
        return decide(replace(request, mode=mode), states.device, states.cloud, states.policy)

    async def _seen(
        self, request: RouteRequest, marks: Marks, hints: Hints, private_by: PrivateBy | None
    ) -> tuple[RouteRequest, States, PrivateBy | None]:
        """Return a request and both sides in their present state. Querying the device takes time, in which
        another request can make this one private.
        """
        states = await self._states(request := _made_private(request, private_by))
        if private_by is None and (private_by := self._private_by(marks, hints)) is not None:
            states = await self._states(request := _made_private(request, private_by))
        return request, states, private_by

    async def _states(self, request: RouteRequest) -> States:
        device = await self._device_state(request)
        day = self._ledger.spent_day(_today())
        threshold = self._threshold.value if self._threshold is not None else self.policy.difficulty_threshold
        return States(
            device, self._cloud_state(), replace(self.policy, spent_day=day, difficulty_threshold=threshold)
        )

    async def _device_state(self, request: RouteRequest) -> DeviceState:
        device = self.device
        if device is None:
            return DeviceState(available=False, why="none was given")
        mode = "device_only" if request.private else request.mode or self.policy.mode
        if isinstance(device, EngineDevice):
            if mode == "cloud_only" and not device.opened:
                return DeviceState(available=False, why="not loaded")
            state = await device.state()
        else:
            state = await _endpoint_state(device, private=request.private)
        if state.available and mode != "device_only" and not self._breakers["device"].allows(self._clock()):
            state = replace(state, available=False, why="failed lately")
        found = power()
        return replace(state, battery=found.battery, charging=found.charging)

    def _cloud_state(self) -> CloudState:
        cloud = self.cloud
        if cloud is None:
            return CloudState(available=False, why="none was given")
        breaker, now = self._breakers["cloud"], self._clock()
        state = breaker.state(now)
        if state == "half_open" and not breaker.allows(now):
            state = "open"  # the breaker's probe is under way
        return CloudState(
            breaker=state,
            retry_after=breaker.retry_after(now),
            context=cloud.context,
            features=cloud.features,
            round_trip=cloud.speeds.round_trip,
            prefill_tps=cloud.speeds.prefill_tps,
            decode_tps=cloud.speeds.decode_tps,
            price_in=cloud.endpoint.price_in,
            price_out=cloud.endpoint.price_out,
        )

    async def _measure(self, call: SideCall, mode: Mode) -> Size:
        if isinstance(self.device, EngineDevice) and (self.device.opened or mode != "cloud_only"):
            # What the engine cannot read (images, tools) goes to the cloud, and its size is estimated.
            with suppress(RequestError):
                if (size := await self.device.measure(call.messages, call.params)) is not None:
                    return size
        return Size(estimate(call.messages, call.params))

    def _conversation(self, name: str | None, size: Size) -> Conversation:
        memory = self._memory.get(name, _Memory()) if name is not None else _Memory()
        warm = (
            self.cloud is not None and self._clock() - memory.cloud_time < self.cloud.endpoint.cache_seconds
        )
        return Conversation(
            last_route=memory.last_route,
            cached_device=size.cached,
            cached_cloud=min(memory.cloud_tokens, size.prompt) if warm else 0,
            spent=self._ledger.spent_conversation(name),
        )

    async def _told(self, call: SideCall) -> Told | None:
        """Return what the device's model shows about a prompt, for a router or for records."""
        fitted = self._fitted
        if fitted is None or not isinstance(self.device, EngineDevice):
            return None
        ask, tokens = (fitted.asks, fitted.row_tokens) if isinstance(fitted, FittedRouter) else (False, None)
        return await self.device.knowledge(call.messages, call.params, ask, tokens)

    def _check_told(self, told: Told) -> None:
        """Raise RequestError for a router that is tied to another model."""
        if isinstance(self._fitted, FittedRouter):
            self._fitted.check(told.artifact, told.model)

    def judge(self, plan: RoutePlan) -> Judge | None:
        """Return the judge of the first tokens of a device's answer; None where the router has none."""
        fitted, told = self._fitted, plan.told
        if not isinstance(fitted, FittedRouter) or fitted.limit is None or told is None:
            return None
        return Judge(fitted, told.knowledge)

    def _difficulty(self, messages: tuple[Mapping[str, Any], ...], told: Told | None) -> float | None:
        if isinstance(self._fitted, FittedRouter):
            return None if told is None else self._fitted.gain(told.knowledge)
        return None if self._score is None else min(max(self._score(messages_to_prompt(messages)), 0.0), 1.0)


def _made_private(request: RouteRequest, private_by: PrivateBy | None) -> RouteRequest:
    if private_by is None:
        return request
    return replace(request, private=True, quotes_private=private_by == "quote")


async def _endpoint_state(side: EndpointSide, *, private: bool) -> DeviceState:
    try:
        await side.describe()
        why = await side.elsewhere() if private else None
    except (SideError, RequestError) as error:
        return DeviceState(available=False, why=str(error))
    context = side.context or 2**31 - 1
    speeds = side.speeds
    return DeviceState(
        here=why is None,
        why=why,
        context=context,
        free_kv_tokens=context,
        features=side.features,
        prefill_tps=speeds.prefill_tps,
        decode_tps=speeds.decode_tps,
    )


_WORDS = {
    "private": "the request is private",
    "private_quote": "the request quotes a private text",
    "mode": "the mode is {value}",
    "context": "{value} tokens do not fit its context of {limit}",
    "kv_memory": "{value} tokens do not fit its free KV memory of {limit}",
    "feature": "it lacks {value}",
    "budget_conversation": "{value} exceeds the budget of the conversation, {limit}",
    "budget_day": "{value} exceeds the budget of the day, {limit}",
    "breaker_open": "it failed, and is asked again in {value} s",
    "retry_after": "it asked to be left alone for {value} s",
}
"""Messages for reasons. For other reasons the code and the value are shown (docs/routing.md, "Reasons")."""


def _words_of(reason: Reason) -> str:
    shown = {
        name: f"{value:.3g}" if isinstance(value, float) else value
        for name, value in (("value", reason.value), ("limit", reason.limit))
    }
    named = reason.code if reason.value is None else f"{reason.code} ({reason.value})"
    return _WORDS[reason.code].format_map(shown) if reason.code in _WORDS else named


def _refusal(decision: RouteDecision) -> NearfarError:
    """Make the error of a request that neither side can take."""
    shown = "; ".join(f"{reason.side or 'request'}: {_words_of(reason)}" for reason in decision.reasons)
    message = (
        f"neither the device nor the cloud can answer this ({shown}): change the mode or the policy, or "
    )
    message += "try later"
    if any(reason.code == "elsewhere" for reason in decision.reasons):
        message += (
            ". A private request needs a device that proves that it computes here: an artifact, an Engine, "
            "or a nearfar serve ARTIFACT of this version that this user runs on this machine with the same "
            "NEARFAR_HOME, at this very port: not over ssh, in a container or behind a proxy"
        )
    waits = [reason.value for reason in decision.reasons if reason.code in ("breaker_open", "retry_after")]
    if waits:
        return OverloadError(message, float(waits[0] or 0.0))
    if any(reason.code in ("unavailable", "offline") for reason in decision.reasons):
        return EngineError(message)
    return RequestError(message)


def _today() -> str:
    """The day of the budgets (UTC)."""
    return datetime.now(UTC).date().isoformat()
