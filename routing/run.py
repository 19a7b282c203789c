"""Runs one request: drives the hand-over table with the events of the sides, and shows the pieces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace

from nearfar.edge_runtime.openai.records import TokenLogprob, Usage
from nearfar.errors import EngineError, NearfarError, OverloadError, RequestError
from nearfar.routing.confidence import Monitor, Token
from nearfar.routing.endpoint import EndpointSide
from nearfar.routing.handover import Action, Event, Outcome, advance, begin, rules_of
from nearfar.routing.policy import MonitorOptions
from nearfar.routing.privacy import without_quotes
from nearfar.routing.request import is_plain
from nearfar.routing.retry import backoff
from nearfar.routing.router import RoutePlan, Router, Ticket
from nearfar.routing.shapes import Provenance, UsagePiece
from nearfar.routing.sides import SideCall, SideError
from nearfar.routing.types import Reason, Side

TOP_LOGPROBS = 5
"""Number of alternatives that are requested where entropy is watched."""

Happened = tuple[Event, UsagePiece | None]


@dataclass(eq=False)
class _Leg:
    """One side's part of the answer, for accounting. `task`: its next event, when both sides are awaited."""

    ticket: Ticket
    source: AsyncGenerator[UsagePiece, None]
    monitor: Monitor | None
    before: int
    count: int = 0
    usage: Usage | None = None
    task: asyncio.Task[Happened] | None = None


class HybridAnswer:
    """The answer of one plan. A piece that `pieces` has yielded is shown: it is never taken back and never
    yielded again.
    """

    def __init__(self, router: Router, plan: RoutePlan, *, streamed: bool) -> None:
        self._router, self.plan, self._policy = router, plan, router.policy
        self._judge = router.judge(plan)
        hold = max(self._policy.hold_tokens, self._judge.tokens if self._judge is not None else 0)
        self._rules = rules_of(
            replace(self._policy, hold_tokens=hold), plan.decision,
            max_tokens=plan.call.max_tokens, plain=is_plain(plan.call.params),
            private=plan.request.private, streamed=streamed,
        )  # fmt: skip
        decision, side = plan.decision, plan.ticket.side if plan.ticket is not None else "device"
        self._state = begin(self._rules, side, decision.reasons, degraded=decision.degraded)
        self._legs: dict[Side, _Leg] = {}
        self._tickets = [plan.ticket] if plan.ticket is not None else []
        self._held: list[UsagePiece] = []
        self._error: SideError | RequestError | None = None
        self._text, self._count = "", 0
        self._parts = 0  # the number of attempts that gave something
        self._usage: Usage | None = None
        self._monitor: Monitor | None = None
        self._beginning: Monitor | None = None  # the monitor that saw the first tokens
        self._started = time.monotonic()
        self._first: float | None = None
        self._spent = 0.0

    @property
    def usage(self) -> Usage:
        """Tokens of the whole answer, from all its parts."""
        if self._usage is not None and self._parts == 1:
            return self._usage
        prompt = self.plan.request.prompt_tokens
        return Usage(prompt, self._count, prompt + self._count)

    def provenance(self, *, whole: bool) -> Provenance:
        """The sides and reasons of the answer, as far as they are known. `whole`: the answer is complete, and
        so are its costs.
        """
        state, plan = self._state, self.plan
        worth = self._router.price(plan, self.usage) if state.path else 0.0
        return Provenance(
            route=state.path[-1] if state.path else plan.decision.route,
            reasons=list(state.reasons),
            degraded=state.degraded,
            decision_id=plan.id,
            path=list(state.path),
            spent=self._spent if whole else None,
            saved=max(worth - self._spent, 0.0) if whole else None,
            would_route=plan.would.route if plan.would is not None else None,
        )

    async def pieces(self) -> AsyncGenerator[UsagePiece, None]:
        """Yield the answer piece by piece, the one with its finish last. Closing this stops the work on both
        sides.
        """
        error: BaseException | None = None
        try:
            happened: Happened = Event("start"), None
            while self._state.phase != "over":
                events, piece = [happened[0]], happened[1]
                while events:
                    self._state, actions = advance(self._rules, self._state, events.pop(0))
                    for action in actions:
                        for shown in self._showing(action, piece):
                            self._note(shown)
                            yield shown
                        if (answer := await self._done(action, piece)) is not None:
                            events.append(answer)
                if self._state.phase != "over":
                    happened = await self._next()
        except BaseException as raised:
            error = raised
            raise
        finally:
            for leg in list(self._legs.values()):
                await self._settle(leg, "left")
            await self._release()
            self._end(error)

    # Performing the table's actions.

    def _showing(self, action: Action, piece: UsagePiece | None) -> list[UsagePiece]:
        """The pieces that an action shows."""
        if action.do == "finish":
            return [UsagePiece(finish="length")]  # the table itself ends an answer only at its length
        if action.do not in ("show", "show_held"):
            return []
        held, self._held = self._held, []
        return [*held, piece] if action.do == "show" and piece is not None else held

    async def _done(self, action: Action, piece: UsagePiece | None) -> Event | None:
        """Run every action except showing. Asking the router returns an event."""
        match action.do:
            case "hold" if piece is not None:
                self._held.append(piece)
            case "drop":
                self._held = []
            case "open":
                self._open(self._tickets[-1])
            case "settle":
                outcome: Outcome = action.what  # type: ignore[assignment]
                await self._settle(self._legs[self._sided(action)], outcome)
            case "retry" if not await self._waited():
                return Event("barred")
            case "admit" | "retry":
                return Event("admitted" if await self._admit(self._sided(action)) else "barred")
            case "fail":
                raise self._given_up() from None
        return None

    def _sided(self, action: Action) -> Side:
        assert action.side is not None
        return action.side

    def _open(self, ticket: Ticket) -> None:
        call = self.plan.call.after(self._text, self._count) if self._count else self.plan.call
        monitor, on_device = None, ticket.side == "device"
        first = self.plan.told is not None and not self._count
        if on_device and (first or self._rules.watched) and not self._state.escalated:
            self._monitor = monitor = Monitor(self._policy.monitor, self._judge if first else None)
            self._beginning = monitor if first else self._beginning
            if self._state.logprobs:
                features = self._router.side("device").features
                call = _watching(call, self._policy.monitor, features, first=first)
        source = self._router.side("device").stream(call) if on_device else self._from_cloud(call)
        self._legs[ticket.side] = _Leg(ticket, source, monitor, self._count)

    async def _from_cloud(self, call: SideCall) -> AsyncGenerator[UsagePiece, None]:
        """Yield the cloud's answer, unless the request became private while the cloud named its model."""
        cloud = self._router.side("cloud")
        assert isinstance(cloud, EndpointSide)
        await cloud.name_model()
        if self._router.private_by(self.plan) is not None:
            raise SideError("the request has become private", "private")
        async with aclosing(cloud.stream(call)) as pieces:
            async for piece in pieces:
                yield piece

    async def _settle(self, leg: _Leg, outcome: Outcome) -> None:
        """Account for a part once, and end it. It is charged if it gave something, or may have begun to."""
        self._legs.pop(leg.ticket.side, None)
        prompt, count = self.plan.request.prompt_tokens + leg.before, leg.count
        used = leg.usage or (Usage(prompt, count, prompt + count) if count or outcome == "left" else None)
        error = self._error if outcome == "failed" and isinstance(self._error, SideError) else None
        self._spent += self._router.leave(leg.ticket, self.plan, outcome, used, error)
        if leg.task is not None:
            leg.task.cancel()
            await asyncio.wait([leg.task])
        await leg.source.aclose()

    async def _release(self) -> None:
        """Give up the prompt that was read for the decision. An answer on the device has its own sequence."""
        if self.plan.told is not None:
            await self.plan.told.release()

    async def _waited(self) -> bool:
        """Wait for a retry. Returns False where the policy or the budget has none left."""
        retry_after = self._error.retry_after if isinstance(self._error, SideError) else None
        wait = backoff(self._state.cloud_failures - 1, self._router.random(), retry_after, self._policy.retry)
        if wait is None or not self._router.retries.withdraw():
            return False
        await asyncio.sleep(wait)
        return True

    async def _admit(self, side: Side) -> bool:
        """Let a side take over. Returns whether it may, and can continue the present text."""
        source = self._router.cloud if side == "cloud" else self._router.device
        if self._text and isinstance(source, EndpointSide) and not source.endpoint.continues:
            return False
        if (ticket := await self._router.admit(self.plan, side)) is None:
            return False
        self._tickets.append(ticket)
        return True

    def _given_up(self) -> NearfarError:
        error, side = self._error, self._state.side
        assert error is not None
        said = without_quotes(str(error), self.plan.call.messages)
        if isinstance(error, RequestError):
            return error if said == str(error) else RequestError(said)
        begun = f" after {self._count} tokens of the answer" if self._count else ""
        message = f"the {side} failed{begun}, and nothing else can answer: {said}"
        if error.busy or error.retry_after is not None:
            return OverloadError(message, error.retry_after if error.retry_after is not None else 1.0)
        return EngineError(message)

    # Reading the events.

    async def _next(self) -> Happened:
        """Wait for the next event of the answering side, or of the faster of two, or "silent" after too long
        without one.
        """
        state, rules = self._state, self._rules
        legs = [self._legs[side] for side in state.running]
        hedging = (
            state.phase == "answering"
            and rules.hedge not in (None, state.side)
            and not state.raced
            and not state.seen
        )
        if len(legs) == 1 and legs[0].task is None and not hedging:
            return await self._of(legs[0])
        for leg in legs:
            leg.task = leg.task or asyncio.create_task(self._of(leg))
        tasks = [leg.task for leg in legs if leg.task is not None]
        await asyncio.wait(
            tasks, timeout=rules.hedge_seconds if hedging else None, return_when=asyncio.FIRST_COMPLETED
        )
        for leg in legs:
            if leg.task is not None and leg.task.done():
                done, leg.task = leg.task, None
                return done.result()
        return Event("silent"), None

    async def _of(self, leg: _Leg) -> Happened:
        """The next event of a side: a piece with a part of the answer, or its end."""
        side = leg.ticket.side
        try:
            while (piece := await anext(leg.source, None)) is not None:
                if not piece.empty:
                    await self._release()
                self._parts += not piece.empty and not leg.count
                leg.count += piece.tokens
                leg.usage = piece.usage or leg.usage
                self._usage = piece.usage or self._usage
                if not piece.empty:
                    plain = not piece.tool_calls and not piece.reasoning
                    return Event(
                        "piece", side, piece.tokens, plain, piece.finish, self._low(leg, piece)
                    ), piece
        except SideError as error:
            self._error = error
            return Event("failed", side, code=error.code), None
        except RequestError as error:
            self._error = error
            wanted = (
                leg.monitor is not None
                and error.param == "logprobs"
                and not self.plan.call.params.get("logprobs")
            )
            known = error.param in (*self.plan.call.params, "messages")
            return Event("refused", side, code=error.param if known else None, unwatched=wanted), None
        if self._state.finish is None:
            self._error = SideError(f"the {side} ended before its answer did", "cut")
        return Event("ended", side), None

    def _low(self, leg: _Leg, piece: UsagePiece) -> Reason | None:
        """The monitor's reason about a piece's tokens, or None. A piece without log-probabilities counts as
        one token.
        """
        if leg.monitor is None or self._state.escalated:
            return None
        if piece.finish is not None:
            return leg.monitor.end()
        tokens = [_token(item) for item in piece.logprobs] or ([Token(piece.text)] if piece.text else [])
        found = [reason for token in tokens if (reason := leg.monitor.push(token)) is not None]
        return found[0] if found else None

    # Recording.

    def _note(self, piece: UsagePiece) -> None:
        """Record a piece that is about to be shown."""
        self._first = self._first or time.monotonic()
        self._text += piece.text
        self._count += piece.tokens

    def _end(self, error: BaseException | None) -> None:
        """Release remaining tickets, remember the conversation, write the decision record."""
        # tickets that were admitted, but whose caller left before the call began
        for ticket in self._tickets:
            self._router.leave(ticket, self.plan, "left", None)
        usage, monitor, path = self.usage, self._monitor, self._state.path
        if path:
            self._router.remember(self.plan, path[-1], usage.total_tokens, self._text)
        shown = self.provenance(whole=True)
        self._router.record(self.plan, {
            "route": shown.route, "path": shown.path, "degraded": shown.degraded,
            "reasons": [asdict(reason) for reason in shown.reasons],
            "ttft": self._first - self._started if self._first is not None else None,
            "seconds": time.monotonic() - self._started, "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens, "spent": shown.spent, "saved": shown.saved,
            "finish": self._state.finish, "lowest_logprob": monitor.lowest_logprob if monitor else None,
            "highest_entropy": monitor.highest_entropy if monitor else None,
            "first_tokens": self._beginning.first if self._beginning else None, "error": _kind(error),
        }, self._text)  # fmt: skip


def _kind(error: BaseException | None) -> str | None:
    """The kind of an error, for records: its message may quote the prompt."""
    if error is None:
        return None
    return "stopped" if isinstance(error, GeneratorExit | asyncio.CancelledError) else type(error).__name__


def _watching(call: SideCall, options: MonitorOptions, features: tuple[str, ...], *, first: bool) -> SideCall:
    """Add the log-probabilities that the monitor needs to the call. `first`: it keeps the first tokens."""
    entropies = first or options.entropy is not None
    needed = TOP_LOGPROBS if entropies else 0 if options.logprob is not None else None
    if needed is None or "logprobs" not in features:
        return call
    return replace(call, top_logprobs=max(needed, call.top_logprobs or 0))


def _token(item: TokenLogprob) -> Token:
    return Token(item.token, item.logprob, tuple(other.logprob for other in item.top_logprobs))
