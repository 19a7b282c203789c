"""Chooses device or cloud: a pure function of request, device, cloud and policy. The TypeScript version is
the same; both pass the shared vectors.

Order of the rules: impossible → budgets → difficulty → speed → power → warm cache → the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from nearfar.routing.policy import Policy
from nearfar.routing.types import (
    CloudState,
    DeviceState,
    Mode,
    Prediction,
    Predictions,
    Reason,
    RouteDecision,
    RouteRequest,
    Side,
)


def decide(request: RouteRequest, device: DeviceState, cloud: CloudState, policy: Policy) -> RouteDecision:
    """Decide where a request goes, and why. Equal arguments give an equal decision: there is no clock and no
    randomness.
    """
    mode: Mode = "device_only" if request.private else request.mode or policy.mode
    predicted = Predictions(predict_device(request, device), predict_cloud(request, cloud))
    cost = cost_of(request.prompt_tokens, request.max_tokens, cloud, policy)
    no_device = _device_blocks(request, device, mode)
    no_cloud = [*_cloud_blocks(request, cloud, mode), *_budget_blocks(request, cost, policy, mode)]
    wanted = _wanted(_Case(request, device, cloud, policy, mode, predicted))
    free: list[Side] = [side for side, blocks in (("device", no_device), ("cloud", no_cloud)) if not blocks]  # type: ignore[misc]
    route = wanted.side if wanted.side in free else next(iter(free), None)
    degraded = route == "device" and wanted.side == "cloud"
    return RouteDecision(
        route=route,
        fallback=next((side for side in free if side != route), None),
        degraded=degraded,
        reasons=(*(wanted.reasons if route == wanted.side or degraded else ()), *no_device, *no_cloud),
        predicted=predicted,
        cost=cost,
    )


def cost_of(prompt_tokens: int, answer_tokens: int, cloud: CloudState, policy: Policy) -> float:
    """Return the cloud's price of a prompt and its answer, in the policy's unit."""
    if policy.budget_unit == "tokens":
        return prompt_tokens + answer_tokens
    return (prompt_tokens * cloud.price_in + answer_tokens * cloud.price_out) / 1e6


def predict_device(request: RouteRequest, device: DeviceState) -> Prediction | None:
    """Predict times on the device; None while its prefill speed is unknown."""
    if not device.prefill_tps:
        return None
    fresh = max(request.prompt_tokens - request.conversation.cached_device, 0)
    return _prediction(device.queue_seconds + fresh / device.prefill_tps, request, device.decode_tps)


def predict_cloud(request: RouteRequest, cloud: CloudState) -> Prediction | None:
    """Predict times in the cloud; None while its round trip is unknown."""
    if cloud.round_trip is None:
        return None
    fresh = max(request.prompt_tokens - request.conversation.cached_cloud, 0)
    prefill = fresh / cloud.prefill_tps if cloud.prefill_tps else 0.0
    return _prediction(cloud.round_trip + cloud.queue_seconds + prefill, request, cloud.decode_tps)


def _prediction(ttft: float, request: RouteRequest, decode_tps: float | None) -> Prediction:
    answer = request.max_tokens
    if request.expected_tokens is not None:
        answer = min(request.expected_tokens, request.max_tokens)
    return Prediction(ttft, ttft + answer / decode_tps if decode_tps else None)


def _device_blocks(request: RouteRequest, device: DeviceState, mode: Mode) -> list[Reason]:
    """The reasons why the device cannot answer."""
    blocks = [Reason("mode", "device", mode)] if mode == "cloud_only" else []
    if not device.available:
        blocks.append(Reason("unavailable", "device", device.why))
        return blocks
    if request.private and not device.here:
        blocks.append(Reason("elsewhere", "device", device.why))
    needed = request.prompt_tokens + request.max_tokens
    if needed > device.context:
        blocks.append(Reason("context", "device", needed, device.context))
    if needed > device.free_kv_tokens:
        blocks.append(Reason("kv_memory", "device", needed, device.free_kv_tokens))
    blocks += [
        Reason("feature", "device", name) for name in sorted(set(request.features) - set(device.features))
    ]
    return blocks


def _cloud_blocks(request: RouteRequest, cloud: CloudState, mode: Mode) -> list[Reason]:
    """The reasons why the cloud cannot, or must not, answer."""
    if request.private:
        return [Reason("private_quote" if request.quotes_private else "private", "cloud")]
    blocks = [Reason("mode", "cloud", mode)] if mode == "device_only" else []
    if not cloud.available:
        blocks.append(Reason("offline" if cloud.why == "offline" else "unavailable", "cloud", cloud.why))
        return blocks
    if cloud.breaker == "open":
        blocks.append(Reason("breaker_open", "cloud", cloud.retry_after))
    elif cloud.retry_after > 0:
        blocks.append(Reason("retry_after", "cloud", cloud.retry_after))
    needed = request.prompt_tokens + request.max_tokens
    if cloud.context is not None and needed > cloud.context:
        blocks.append(Reason("context", "cloud", needed, cloud.context))
    blocks += [
        Reason("feature", "cloud", name) for name in sorted(set(request.features) - set(cloud.features))
    ]
    return blocks


def _budget_blocks(request: RouteRequest, cost: float, policy: Policy, mode: Mode) -> list[Reason]:
    """The budgets that the call could exceed. A cloud_only request is not bound by budgets."""
    if mode in ("device_only", "cloud_only"):
        return []
    blocks = []
    spent = request.conversation.spent
    if policy.budget_conversation is not None and spent + cost > policy.budget_conversation:
        blocks.append(Reason("budget_conversation", "cloud", spent + cost, policy.budget_conversation))
    if policy.budget_day is not None and policy.spent_day + cost > policy.budget_day:
        blocks.append(Reason("budget_day", "cloud", policy.spent_day + cost, policy.budget_day))
    return blocks


@dataclass(frozen=True)
class _Case:
    request: RouteRequest
    device: DeviceState
    cloud: CloudState
    policy: Policy
    mode: Mode
    predicted: Predictions


@dataclass(frozen=True)
class _Wanted:
    side: Side
    reasons: tuple[Reason, ...]


def _wanted(case: _Case) -> _Wanted:
    """The side where the request should go if both could take it."""
    if case.mode in ("device_only", "cloud_only"):  # the other side's block is the only reason
        return _Wanted("device" if case.mode == "device_only" else "cloud", ())
    if case.mode == "prefer_device":
        return _Wanted("device", (Reason("preferred", "device", case.mode),))
    if case.mode == "prefer_cloud":
        return _Wanted("cloud", (Reason("preferred", "cloud", case.mode),))
    difficulty, threshold = case.request.difficulty, case.policy.difficulty_threshold
    if difficulty is not None and difficulty >= threshold:
        return _Wanted("cloud", (Reason("hard", "device", difficulty, threshold),))
    if slow := _slow(case):
        return _Wanted("cloud", slow)
    power, sticky = _power(case.device, case.policy), _sticky(case)
    if (power or sticky) and case.cloud.metered:
        return _Wanted("device", (Reason("metered", "cloud"),))
    if power or sticky:
        return _Wanted("cloud", power or sticky)
    if difficulty is not None:
        return _Wanted("device", (Reason("easy", "device", difficulty, threshold),))
    return _Wanted("device", (Reason("preferred", "device"),))


def _slow(case: _Case) -> tuple[Reason, ...]:
    """The objectives that the device misses, where the cloud is expected to be faster or its speed is
    unknown.
    """
    device, cloud, policy = case.predicted.device, case.predicted.cloud, case.policy
    if device is None:
        return ()
    reasons = []
    if policy.ttft is not None and device.ttft > policy.ttft and (cloud is None or cloud.ttft < device.ttft):
        reasons.append(Reason("slow_ttft", "device", device.ttft, policy.ttft))
    if policy.completion is not None and device.total is not None and device.total > policy.completion:
        other = cloud.total if cloud is not None else None
        if other is None or other < device.total:
            reasons.append(Reason("slow_total", "device", device.total, policy.completion))
    return tuple(reasons)


def _power(device: DeviceState, policy: Policy) -> tuple[Reason, ...]:
    """The reasons of the device's battery to use the cloud."""
    if device.charging:
        return ()
    reasons = []
    if device.battery is not None and device.battery < policy.battery_floor:
        reasons.append(Reason("battery", "device", device.battery, policy.battery_floor))
    if device.power_saver:
        reasons.append(Reason("power_saver", "device"))
    return tuple(reasons)


def _sticky(case: _Case) -> tuple[Reason, ...]:
    """The reason to stay in the cloud: the conversation's cache is warm there, and a prefill on the device
    takes too long or an unknown time.
    """
    conversation, device = case.request.conversation, case.device
    if conversation.last_route != "cloud" or conversation.cached_cloud <= conversation.cached_device:
        return ()
    fresh = max(case.request.prompt_tokens - conversation.cached_device, 0)
    seconds = fresh / device.prefill_tps if device.prefill_tps else None
    if seconds is not None and seconds <= case.policy.sticky_seconds:
        return ()
    return (Reason("sticky", "cloud", seconds, case.policy.sticky_seconds),)
