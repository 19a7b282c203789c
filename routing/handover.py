"""The hand-over as a table: (phase, event) → next state and actions. The TypeScript version is the same; both
replay the same scripts.

The table is pure: it has no clock, no text, no I/O. A driver reports events and performs the actions: it asks
the router whether a side may take over, calls the side, shows pieces. What has been shown is never taken
back; after a finish no side continues.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from nearfar.routing.policy import Policy
from nearfar.routing.types import Reason, RouteDecision, Side

Phase = Literal["idle", "answering", "racing", "asking", "finished", "over"]
"""racing: both sides answer, nothing is shown yet. asking: the router decides whether a side may take over.
finished: the answer is complete, and its side still reports its usage.
"""

EventKind = Literal["start", "piece", "ended", "failed", "refused", "silent", "admitted", "barred", "left"]
Outcome = Literal["ok", "failed", "refused", "left"]
Why = Literal["failed", "refused", "unwatched", "low", "hedge"]

FINAL = ("401", "403", "404", "shape", "no_continuation")
"""Codes of failures that a second try does not change."""


@dataclass(frozen=True)
class Rules:
    """Settings that stay the same during an answer.

    `plain`: the text is all that another side must know to continue. `watched`: the device's monitor may
    escalate to the cloud; `restart`: the escalated answer begins again while nothing is shown; `hold`: tokens
    that are held back for that. `hedge`: the side that is started in addition after `hedge_seconds` of
    silence.
    """

    max_tokens: int
    plain: bool = True
    private: bool = False
    watched: bool = False
    restart: bool = False
    hold: int = 0
    hedge: Side | None = None
    hedge_seconds: float | None = None
    after_cut: Side = "device"
    before_fallback: int = 0


@dataclass(frozen=True)
class Event:
    """An event. "piece": `tokens` of the answer, the last one with a `finish`; `low`: why the monitor flagged
    it.

    "failed": `code` is the kind of failure. "refused": `code` is the rejected parameter; `unwatched`: only
    the monitor wanted the rejected logprobs.
    """

    on: EventKind
    side: Side | None = None
    tokens: int = 1
    plain: bool = True
    finish: str | None = None
    low: Reason | None = None
    code: str | None = None
    unwatched: bool = False


@dataclass(frozen=True)
class Action:
    """An action of the driver.

    "open": start a side. "settle": end its part and account for it. "admit", "retry": ask the router whether
    a side may take over, "retry" after a wait; the answer is an event. "hold": hold the piece back. "show":
    show the held pieces and this one. "show_held": show the held pieces. "drop": discard the held pieces.
    "finish": end the answer without a finish from a side. "fail": raise the last error.
    """

    do: Literal["open", "settle", "admit", "retry", "hold", "show", "show_held", "drop", "finish", "fail"]
    side: Side | None = None
    what: str | None = None

    def __str__(self) -> str:
        return " ".join(part for part in (self.do, self.side, self.what) if part is not None)


@dataclass(frozen=True)
class State:
    """The state of an answer. `shown`: tokens that the caller has; `held`: tokens that are held back; `seen`:
    tokens of the present part.
    """

    side: Side
    phase: Phase = "idle"
    shown: int = 0
    held: int = 0
    seen: int = 0
    plain: bool = True
    finish: str | None = None
    path: tuple[Side, ...] = ()
    reasons: tuple[Reason, ...] = ()
    degraded: bool = False
    device_failures: int = 0
    cloud_failures: int = 0
    watching: bool = False
    escalated: bool = False
    logprobs: bool = True
    raced: bool = False
    why: Why | None = None
    candidates: tuple[Side, ...] = ()
    pending: Event | None = field(default=None, compare=False)

    @property
    def running(self) -> tuple[Side, ...]:
        """The sides that have a part open."""
        if self.phase == "racing":
            return (self.side, _other(self.side))
        if self.phase in ("answering", "finished") or (
            self.phase == "asking" and self.why in ("low", "hedge")
        ):
            return (self.side,)
        return ()


Next = tuple[State, tuple[Action, ...]]


def rules_of(
    policy: Policy, decision: RouteDecision, *, max_tokens: int, plain: bool, private: bool, streamed: bool
) -> Rules:
    """Make the rules of one answer. A whole answer is shown only at its end, so all of it can be replaced."""
    free = policy.shadow is None and not private
    watched = free and policy.escalation != "off" and decision.fallback == "cloud"
    restart = policy.escalation == "restart"
    return Rules(
        max_tokens=max_tokens,
        plain=plain,
        private=private,
        watched=watched,
        restart=restart,
        hold=(max_tokens + 1 if restart and not streamed else policy.hold_tokens) if watched else 0,
        hedge=decision.fallback if free and policy.hedge_seconds is not None else None,
        hedge_seconds=policy.hedge_seconds,
        after_cut=policy.after_cut,
        before_fallback=policy.retry.before_fallback,
    )


def begin(rules: Rules, side: Side, reasons: tuple[Reason, ...] = (), *, degraded: bool = False) -> State:
    """Return the state before the first event, which is "start"."""
    return State(side, plain=rules.plain, reasons=reasons, degraded=degraded)


def advance(rules: Rules, state: State, event: Event) -> Next:
    """Return the next state and the actions. An event that the table does not have came late and changes
    nothing.
    """
    if (row := TABLE.get((state.phase, event.on))) is None:
        return state, ()
    if state.phase in ("answering", "finished") and event.side not in (None, state.side):
        return state, ()
    return row(rules, state, event)


def _start(rules: Rules, state: State, event: Event) -> Next:
    return _open(rules, state, state.side)


def _piece(rules: Rules, state: State, event: Event) -> Next:
    state = replace(state, seen=state.seen + event.tokens)
    if state.watching and event.low is not None and (event.finish is None or _unseen(rules, state)):
        return _low(rules, state, event)
    if state.watching and event.finish is None and state.seen < rules.hold:
        return replace(state, held=state.held + event.tokens, plain=state.plain and event.plain), (
            Action("hold"),
        )
    return _show(state, event)


def _unseen(rules: Rules, state: State) -> bool:
    """Whether a complete answer can still be replaced, because nothing of it is shown."""
    return rules.restart and not state.shown


def _show(state: State, event: Event) -> Next:
    shown = _shown(state)
    return replace(
        shown,
        shown=shown.shown + event.tokens,
        plain=state.plain and event.plain,
        finish=event.finish,
        pending=None,
        phase="answering" if event.finish is None else "finished",
    ), (Action("show"),)


def _shown(state: State) -> State:
    path = state.path if state.path[-1:] == (state.side,) else (*state.path, state.side)
    return replace(state, shown=state.shown + state.held, held=0, path=path)


def _low(rules: Rules, state: State, event: Event) -> Next:
    """The monitor flagged the answer: hand over to the cloud if allowed. Held pieces are shown, unless they
    can be replaced.
    """
    actions: tuple[Action, ...] = ()
    assert event.low is not None
    state = replace(state, watching=False, escalated=True, pending=event, reasons=(*state.reasons, event.low))
    if state.held and (state.shown or not rules.restart):
        state, actions = _shown(state), (Action("show_held"),)
    return _ask(rules, state, ("cloud",), "low", actions)


def _failed(rules: Rules, state: State, event: Event) -> Next:
    """A side failed: choose who continues. A failed device is not tried again, a failed cloud only as a
    retry.
    """
    side, code = state.side, event.code or "cut"
    actions = (Action("settle", side, "failed"), *_dropping(state))
    state = _dropped(rules, state)
    if state.shown >= rules.max_tokens:
        return replace(state, phase="over", finish="length"), (*actions, Action("finish", None, "length"))
    state = _counted(state, side, code)
    return _ask(rules, state, _order(rules, state, code), "failed", actions)


def _order(rules: Rules, state: State, code: str) -> tuple[Side, ...]:
    if state.side == "device":
        return () if state.cloud_failures else ("cloud",)
    device: tuple[Side, ...] = () if state.device_failures else ("device",)
    if code in FINAL:
        return device
    again = rules.after_cut == "cloud" if state.shown else state.cloud_failures <= rules.before_fallback
    return ("cloud", *device) if again else (*device, "cloud")


def _refused(rules: Rules, state: State, event: Event) -> Next:
    """A side rejected the request. The cloud may take what the device rejects if nothing is shown yet; the
    cloud's rejection goes to the caller.
    """
    actions = (Action("settle", state.side, "refused"), *_dropping(state))
    state = _dropped(rules, state)
    if state.side == "cloud" or state.shown:
        return _ask(rules, state, (), "refused", actions)
    if event.unwatched and state.logprobs:
        return _ask(rules, replace(state, logprobs=False), ("device",), "unwatched", actions)
    return _ask(rules, replace(state, pending=event), ("cloud",), "refused", actions)


def _silent(rules: Rules, state: State, event: Event) -> Next:
    if rules.hedge in (None, state.side) or state.raced or state.seen:
        return state, ()
    assert rules.hedge is not None
    return _ask(rules, replace(state, raced=True), (rules.hedge,), "hedge", ())


def _ask(
    rules: Rules, state: State, candidates: tuple[Side, ...], why: Why, actions: tuple[Action, ...]
) -> Next:
    """Ask the router for the first candidate. A private answer excludes the cloud, and an answer that cannot
    be continued has no candidates.
    """
    if rules.private:
        candidates = tuple(side for side in candidates if side != "cloud")
    if state.shown and not state.plain:
        candidates = ()
    state = replace(state, phase="asking", candidates=candidates, why=why)
    if not candidates:
        return _nobody(rules, state, actions)
    again = why == "failed" and candidates[0] == state.side
    return state, (*actions, Action("retry" if again else "admit", candidates[0]))


def _nobody(rules: Rules, state: State, actions: tuple[Action, ...] = ()) -> Next:
    """No side takes over: the present side continues, if it can."""
    if state.why == "hedge":
        return replace(state, phase="answering"), actions
    if state.why == "low" and state.pending is not None:  # the cloud was wanted, so the answer is degraded
        shown, more = _show(replace(state, degraded=True), state.pending)
        return shown, (*actions, *more)
    return replace(state, phase="over"), (*actions, Action("fail"))


def _barred(rules: Rules, state: State, event: Event) -> Next:
    if len(state.candidates) < 2 or state.why is None:
        return _nobody(rules, state)
    return _ask(rules, state, state.candidates[1:], state.why, ())


def _admitted(rules: Rules, state: State, event: Event) -> Next:
    to, before = state.candidates[0], state.side
    actions: tuple[Action, ...] = ()
    if state.why == "hedge":
        hedged = replace(
            state, phase="racing", reasons=(*state.reasons, Reason("hedged", to, rules.hedge_seconds))
        )
        return hedged, (Action("open", to),)
    if state.why == "low":
        actions = (Action("settle", before, "left"), *_dropping(state, pending=True))
        state = _dropped(rules, state)
    elif state.why == "refused":
        code = state.pending.code if state.pending is not None else None
        state = replace(state, reasons=(*state.reasons, Reason("refused", before, code)))
    elif state.why == "failed":
        state = replace(state, degraded=state.degraded or (before == "cloud" and to == "device"))
    opened, opening = _open(rules, state, to)
    return opened, (*actions, *opening)


def _open(rules: Rules, state: State, side: Side) -> Next:
    return replace(_facing(rules, state, side), seen=0, held=0, pending=None, candidates=(), why=None), (
        Action("open", side),
    )


def _facing(rules: Rules, state: State, side: Side) -> State:
    """Make one side the answering one."""
    watching = side == "device" and rules.watched and not state.escalated
    return replace(state, phase="answering", side=side, watching=watching)


def _won(rules: Rules, state: State, event: Event) -> Next:
    """The first useful piece decides the race."""
    won = event.side or state.side
    after, actions = _piece(rules, _facing(rules, state, won), event)
    return after, (Action("settle", _other(won), "left"), *actions)


def _fell_out(rules: Rules, state: State, event: Event) -> Next:
    """One of the two sides left the race; the other continues alone."""
    out = event.side or state.side
    if event.on == "refused":
        noted = (
            state
            if out == "cloud"
            else replace(state, reasons=(*state.reasons, Reason("refused", out, event.code)))
        )
        return _facing(rules, noted, _other(out)), (Action("settle", out, "refused"),)
    return _facing(rules, _counted(state, out, event.code or "cut"), _other(out)), (
        Action("settle", out, "failed"),
    )


def _whole(rules: Rules, state: State, event: Event) -> Next:
    """After the finish the answer is complete, however its stream ends."""
    return replace(state, phase="over"), (Action("settle", state.side, "ok"),)


def _left(rules: Rules, state: State, event: Event) -> Next:
    return replace(state, phase="over"), tuple(Action("settle", side, "left") for side in state.running)


def _counted(state: State, side: Side, code: str) -> State:
    reasons = (*state.reasons, Reason("cut" if state.shown else "failed", side, code))
    if side == "device":
        return replace(state, reasons=reasons, device_failures=state.device_failures + 1)
    return replace(state, reasons=reasons, cloud_failures=state.cloud_failures + 1)


def _dropped(rules: Rules, state: State) -> State:
    """Discard what was held back, which no one has seen."""
    return replace(state, held=0, plain=state.plain if state.shown else rules.plain)


def _dropping(state: State, *, pending: bool = False) -> tuple[Action, ...]:
    return (Action("drop"),) if state.held or pending else ()


def _other(side: Side) -> Side:
    return "cloud" if side == "device" else "device"


TABLE: dict[tuple[Phase, EventKind], Callable[[Rules, State, Event], Next]] = {
    ("idle", "start"): _start,
    ("idle", "left"): _left,
    ("answering", "piece"): _piece,
    ("answering", "ended"): _failed,
    ("answering", "failed"): _failed,
    ("answering", "refused"): _refused,
    ("answering", "silent"): _silent,
    ("answering", "left"): _left,
    ("racing", "piece"): _won,
    ("racing", "ended"): _fell_out,
    ("racing", "failed"): _fell_out,
    ("racing", "refused"): _fell_out,
    ("racing", "left"): _left,
    ("asking", "admitted"): _admitted,
    ("asking", "barred"): _barred,
    ("asking", "left"): _left,
    ("finished", "ended"): _whole,
    ("finished", "failed"): _whole,
    ("finished", "refused"): _whole,
    ("finished", "left"): _left,
}
