"""One request on its way: through the side that was chosen, and the other where that one fails or loses its thread."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import asdict, replace

from nearfar.edge_runtime.types import TokenLogprob, Usage
from nearfar.errors import EngineError, NearfarError, OverloadError, RequestError
from nearfar.routing.confidence import Monitor, Token
from nearfar.routing.endpoint import EndpointSide
from nearfar.routing.request import is_plain
from nearfar.routing.retry import backoff
from nearfar.routing.router import Outcome, Plan, Router, Ticket
from nearfar.routing.shapes import Piece, Provenance
from nearfar.routing.sides import Call, SideError
from nearfar.routing.types import Reason, Side

TOP_LOGPROBS = 5
"""Alternatives asked for where entropy is watched."""

Pieces = AsyncGenerator[Piece, None]
Runner = asyncio.Task["tuple[Side, Piece] | None"]


class _Failed(Exception):
    """One side failed, or refused."""

    def __init__(self, side: Side, error: SideError | RequestError) -> None:
        super().__init__(str(error))
        self.side, self.error = side, error


class Run:
    """The answer of one plan. What `pieces` has given out is shown: it is never taken back and never given again."""

    def __init__(self, router: Router, plan: Plan, *, streamed: bool) -> None:
        self._router, self.plan, self._policy = router, plan, router.policy
        self._streamed = streamed
        self._text, self._count = "", 0
        self._plain = is_plain(plan.call.params)
        self._failures: dict[Side, int] = {"device": 0, "cloud": 0}
        self._handover: Ticket | None = None
        self._tickets = [plan.ticket] if plan.ticket is not None else []
        self._usage: Usage | None = None
        self._parts = 0  # attempts that gave something
        self._monitor: Monitor | None = None
        self._escalated = False
        self._started = time.monotonic()
        self._first: float | None = None
        self._finish: str | None = None
        self._spent = 0.0
        self.path: list[Side] = []
        self.reasons = list(plan.decision.reasons)
        self.degraded = plan.decision.degraded

    @property
    def usage(self) -> Usage:
        """Tokens of the whole answer, wherever its parts came from."""
        if self._usage is not None and self._parts == 1:
            return self._usage
        return Usage(self.plan.request.prompt_tokens, self._count, self.plan.request.prompt_tokens + self._count)

    def provenance(self, *, whole: bool) -> Provenance:
        """Where the answer comes from, as far as it is known. `whole`: it is complete, and so are its costs."""
        worth = self._router.price(self.plan, self.usage) if self.path else 0.0
        return Provenance(
            route=self.path[-1] if self.path else self.plan.decision.route, reasons=list(self.reasons),
            degraded=self.degraded, decision_id=self.plan.id, path=list(self.path),
            spent=self._spent if whole else None, saved=max(worth - self._spent, 0.0) if whole else None,
            would_route=self.plan.would.route if self.plan.would is not None else None,
        )  # fmt: skip

    async def pieces(self) -> Pieces:
        """The answer piece by piece, the one with its finish last. Closing this stops the work on both sides."""
        error: BaseException | None = None
        try:
            async with aclosing(self._relayed()) as relayed:
                async for side, piece in relayed:
                    self._note(side, piece)
                    if piece.useful:
                        yield piece
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._end(error)

    async def _relayed(self) -> AsyncGenerator[tuple[Side, Piece], None]:
        """Pieces of one side after the other, until one has brought the answer to its end."""
        ticket = self.plan.ticket
        hedged = self._policy.hedge_seconds is not None and self._policy.shadow is None
        while ticket is not None:
            source = self._raced(ticket) if hedged else self._attempt(ticket)
            hedged = False
            try:
                async with aclosing(source) as pieces:
                    async for item in pieces:
                        yield item
                ticket, self._handover = self._handover, None
            except _Failed as failed:
                ticket = await self._after(failed)

    async def _attempt(self, ticket: Ticket) -> AsyncGenerator[tuple[Side, Piece], None]:
        """The answer, or the rest of it, from one side. Tells the router how it went."""
        side, count, usage = ticket.side, 0, None
        call = self.plan.call.after(self._text, self._count) if self._count else self.plan.call
        watched = side == "device" and self._may_escalate()
        source = self._router.side(side).stream(self._watching(call) if watched else call)
        try:
            async with aclosing(source) as raw, aclosing(self._watched(raw) if watched else raw) as pieces:
                async for piece in pieces:
                    self._parts += piece.useful and not count
                    count += piece.count
                    usage = piece.usage or usage
                    yield side, piece
            self._left(ticket, "ok", count, usage)
        except SideError as error:
            self._left(ticket, "busy" if error.busy else "failed", count, usage, error)
            raise _Failed(side, error) from error
        except RequestError as error:
            self._left(ticket, "abandoned", count, usage)
            raise _Failed(side, error) from error
        finally:  # the caller left; the prompt may have been computed
            self._left(ticket, "abandoned", count, usage, begun=True)

    def _left(
        self, ticket: Ticket, outcome: Outcome, count: int, usage: Usage | None, error: SideError | None = None,
        *, begun: bool = False,
    ) -> None:  # fmt: skip
        """Settle an attempt once. It is charged for if it gave something, or may have `begun` to."""
        prompt = self.plan.request.prompt_tokens + self._count - count
        used = usage or (Usage(prompt, count, prompt + count) if count or begun else None)
        self._spent += self._router.leave(ticket, self.plan, outcome, used, error)

    # What the device's monitor does.

    def _may_escalate(self) -> bool:
        cloud = self._router.cloud
        return (
            self._policy.escalation != "off" and self._policy.shadow is None and not self._escalated
            and cloud is not None and self.plan.decision.fallback == "cloud"
        )  # fmt: skip

    def _watching(self, call: Call) -> Call:
        """The call with the log-probabilities that the monitor needs."""
        options = self._policy.monitor
        needed = TOP_LOGPROBS if options.entropy is not None else 0 if options.logprob is not None else None
        if needed is None or "logprobs" not in self._router.side("device").features:
            return call
        return replace(call, top_logprobs=max(needed, call.top_logprobs or 0))

    async def _watched(self, pieces: Pieces) -> Pieces:
        """Pass pieces on while the monitor is content; else hand over to the cloud, if it may take over.

        The piece that discontents the monitor is not shown. The first ones are held back as the policy says.
        """
        self._monitor = monitor = Monitor(self._policy.monitor)
        restart = self._policy.escalation == "restart"
        hold = math.inf if restart and not self._streamed else self._policy.hold_tokens
        held: list[Piece] = []
        seen, watching = 0, True
        async for piece in pieces:
            reason = _worst(monitor, piece) if watching and piece.finish is None else None
            if reason is not None:
                watching = False
                self.reasons.append(reason)
                self._escalated = True
                if (not restart or self._count) and held:
                    for waiting in held:
                        yield waiting
                    held = []
                if (ticket := await self._admit("cloud")) is not None:
                    self._handover = ticket
                    return
                self.degraded = True  # the cloud was wanted
            seen += piece.count
            if watching and seen < hold and piece.finish is None:
                held.append(piece)
                continue
            for waiting in (*held, piece):
                yield waiting
            held = []
        for waiting in held:
            yield waiting

    # What happens when a side fails.

    async def _after(self, failed: _Failed) -> Ticket:
        """Who goes on after a side failed. What a side refuses the other may take, if nothing is shown yet."""
        side, error = failed.side, failed.error
        if isinstance(error, RequestError):
            if side == "device" and not self._count and (ticket := await self._admit("cloud")) is not None:
                self.reasons.append(Reason("refused", "device", str(error)))
                return ticket
            raise error
        self._failures[side] += 1
        self.reasons.append(Reason("cut" if self._count else "failed", side, error.code))
        for other in self._order(side):
            if other == side and not await self._retry(error):
                continue
            if (ticket := await self._admit(other)) is not None:
                self.degraded = self.degraded or (side == "cloud" and other == "device")
                return ticket
        raise self._given_up(side, error) from error

    def _order(self, failed: Side) -> list[Side]:
        """Who is asked next, in order. A device that failed is not asked again, a cloud that failed only as a retry."""
        device: list[Side] = ["device"] if not self._failures["device"] else []
        if failed == "device":
            return ["cloud"] if not self._failures["cloud"] else []
        again = self._policy.after_cut == "cloud" if self._count else (
            self._failures["cloud"] <= self._policy.retry.before_fallback
        )  # fmt: skip
        return ["cloud", *device] if again else [*device, "cloud"]

    async def _retry(self, error: SideError) -> bool:
        """Wait for a retry, if the policy and the budget have one left."""
        if error.code in ("no_continuation", "401", "403", "404", "shape"):
            return False
        options = self._policy.retry
        wait = backoff(self._failures["cloud"] - 1, self._router.random(), error.retry_after, options)
        if wait is None or not self._router.retries.withdraw():
            return False
        await asyncio.sleep(wait)
        return True

    async def _admit(self, side: Side) -> Ticket | None:
        """Let a side take over, if the answer can go on there at all."""
        if self._count and not self._plain:
            return None
        source = self._router.cloud if side == "cloud" else self._router.device
        if self._text and isinstance(source, EndpointSide) and not source.endpoint.continues:
            return None
        if (ticket := await self._router.admit(self.plan, side)) is not None:
            self._tickets.append(ticket)
        return ticket

    def _given_up(self, side: Side, error: SideError) -> NearfarError:
        begun = f" after {self._count} tokens of the answer" if self._count else ""
        message = f"the {side} failed{begun}, and nothing else can answer: {error}"
        if error.busy or error.retry_after is not None:
            return OverloadError(message, error.retry_after if error.retry_after is not None else 1.0)
        return EngineError(message)

    async def _raced(self, ticket: Ticket) -> AsyncGenerator[tuple[Side, Piece], None]:
        """Hedging: the other side starts too if no piece comes in time; the first useful piece decides."""
        runners = {ticket.side: self._attempt(ticket)}
        firsts = {ticket.side: asyncio.create_task(_next(runners[ticket.side]))}
        try:
            await asyncio.wait(firsts.values(), timeout=self._policy.hedge_seconds)
            other: Side = "cloud" if ticket.side == "device" else "device"
            late = not firsts[ticket.side].done()
            if late and self.plan.decision.fallback == other and (second := await self._admit(other)) is not None:
                self.reasons.append(Reason("hedged", other, self._policy.hedge_seconds))
                runners[other] = self._attempt(second)
                firsts[other] = asyncio.create_task(_next(runners[other]))
            winner, first = await self._winner(firsts)
            for side in [name for name in runners if name != winner]:
                await _stop(firsts.pop(side), runners.pop(side))
            if first is not None:
                yield first
            async for item in runners[winner]:
                yield item
        finally:
            for side in list(runners):
                await _stop(firsts[side], runners[side])

    async def _winner(self, firsts: Mapping[Side, Runner]) -> tuple[Side, tuple[Side, Piece] | None]:
        """Who comes first with a piece. A side that fails drops out while another still runs."""
        waiting = dict(firsts)
        while True:
            await asyncio.wait(waiting.values(), return_when=asyncio.FIRST_COMPLETED)
            for side in [name for name in waiting if waiting[name].done()]:
                failed = waiting[side].exception()
                if failed is None or len(waiting) == 1:
                    return side, waiting[side].result()
                if isinstance(failed, _Failed) and isinstance(failed.error, SideError):
                    self._failures[side] += 1
                    self.reasons.append(Reason("failed", side, failed.error.code))
                del waiting[side]

    # What is noted on the way.

    def _note(self, side: Side, piece: Piece) -> None:
        """Take note of what is about to be shown."""
        if piece.usage is not None:
            self._usage = piece.usage
        if not piece.useful:
            return
        if not self.path or self.path[-1] != side:
            self.path.append(side)
        self._first = self._first or time.monotonic()
        self._text += piece.text
        self._count += piece.count
        self._plain = self._plain and not piece.calls and not piece.reasoning
        self._finish = piece.finish or self._finish

    def _end(self, error: BaseException | None) -> None:
        """Give back what is still held, remember the conversation, write the decision record."""
        for ticket in self._tickets:  # admitted, but the caller left before the call began
            self._router.leave(ticket, self.plan, "abandoned", None)
        usage = self.usage
        if self.path:
            self._router.remember(self.plan, self.path[-1], usage.total_tokens)
        monitor, stopped = self._monitor, isinstance(error, GeneratorExit | asyncio.CancelledError)
        shown = self.provenance(whole=True)
        self._router.record(self.plan, {
            "route": shown.route, "path": shown.path, "degraded": shown.degraded,
            "reasons": [asdict(reason) for reason in shown.reasons],
            "ttft": self._first - self._started if self._first is not None else None,
            "seconds": time.monotonic() - self._started, "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens, "spent": shown.spent, "saved": shown.saved,
            "finish": self._finish, "lowest_logprob": monitor.lowest_logprob if monitor else None,
            "highest_entropy": monitor.highest_entropy if monitor else None,
            "error": None if error is None else "stopped" if stopped else str(error),
        }, self._text)  # fmt: skip


def _worst(monitor: Monitor, piece: Piece) -> Reason | None:
    """What the monitor says of a piece's tokens. A piece without log-probabilities counts as one token."""
    tokens = [_token(item) for item in piece.logprobs] or ([Token(piece.text)] if piece.text else [])
    reasons = [reason for token in tokens if (reason := monitor.push(token)) is not None]
    return reasons[0] if reasons else None


def _token(item: TokenLogprob) -> Token:
    return Token(item.token, item.logprob, tuple(other.logprob for other in item.top_logprobs))


async def _next(runner: AsyncGenerator[tuple[Side, Piece], None]) -> tuple[Side, Piece] | None:
    return await anext(runner, None)


async def _stop(first: Runner, runner: AsyncGenerator[tuple[Side, Piece], None]) -> None:
    """End a runner, wherever it is."""
    first.cancel()
    await asyncio.wait([first])
    await runner.aclose()
