"""Fits conversations into the context by leaving out whole turns, as the web engine does
(tests/vectors/context).
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from nearfar.edge_runtime.openai.messages import checked_messages
from nearfar.edge_runtime.text.beside import beside, characters
from nearfar.errors import RequestError

Message = Mapping[str, Any]
M = TypeVar("M", bound=Message)

_ANSWER_SHARE = 4
"""The divisor of the context that gives the reserved answer tokens of a request without a length."""
_MOST_SHARE = 2
"""The divisor of the context that gives the most reserved answer tokens."""


@dataclass(frozen=True)
class Overflow:
    """A conversation that leaves too little room for an answer."""

    messages: Seq[Message]
    tokens: int
    """Tokens of the conversation as a prompt."""
    limit: int
    """The most tokens that the prompt may have."""
    context: int
    count: Callable[[Seq[Message]], int]
    """Counts the tokens of other messages as a prompt."""


ContextPolicy = (
    Literal["error", "truncate-oldest"] | Callable[[Overflow], Seq[Message] | Awaitable[Seq[Message]]]
)
"""The handling of a conversation that does not fit: an error, dropping the oldest turns, or a function's
choice.
"""


@dataclass(frozen=True)
class Fitted:
    """The part of a conversation that becomes the prompt."""

    tokens: list[int]
    left_out: int | None
    """The number of messages left out; None if none is."""


def check_policy(policy: object) -> None:
    """Raise RequestError for an unknown policy."""
    if policy not in ("error", "truncate-oldest") and not callable(policy):
        raise RequestError(
            f"context_policy must be 'error', 'truncate-oldest' or a function, not {policy!r:.80}",
            "context_policy",
        )


def prompt_limit(context: int, max_tokens: int | None) -> int:
    """The most tokens of a prompt that leaves room for an answer of `max_tokens`."""
    wanted = -(-context // _ANSWER_SHARE) if max_tokens is None else max_tokens
    return context - min(wanted, max(context // _MOST_SHARE, 1))


def turns_of(messages: Seq[Message]) -> list[int]:
    """The index at which each turn begins: a user's message that does not follow another one.

    Messages before the first user's belong to the first turn, except the system prompt: the messages of role
    system or developer at the beginning.
    """
    roles = [message["role"] for message in messages]
    first = next((at for at, role in enumerate(roles) if role not in ("system", "developer")), None)
    if first is None:
        return []
    begins = [
        at
        for at in range(first, len(roles))
        if at == first or (roles[at] == "user" and roles[at - 1] != "user")
    ]
    # A greeting before the first question is dropped together with it.
    return begins if roles[first] == "user" else begins[:1] + begins[2:]


def without_turns(messages: Seq[M], count: int) -> list[M]:
    """The messages without their `count` oldest turns."""
    begins = turns_of(messages)
    if not begins:
        return list(messages)
    rest = begins[count] if count < len(begins) else len(messages)
    return [*messages[: begins[0]], *messages[rest:]]


def turns_to_drop(messages: Seq[M], limit: int, count: Callable[[Seq[M]], int]) -> int:
    """The fewest turns to drop so that the rest has at most `limit` tokens; at most all but the last."""
    low, high = 1, max(len(turns_of(messages)) - 1, 0)
    while low < high:
        middle = (low + high) // 2
        if count(without_turns(messages, middle)) <= limit:
            high = middle
        else:
            low = middle + 1
    return high


async def fit_context(
    messages: Seq[Message],
    policy: ContextPolicy,
    room: tuple[int, int | None],
    encode: Callable[[Seq[Message]], list[int]],
    goes_on: bool,
) -> Fitted:
    """Make the prompt of a conversation under the policy.

    `room`: tokens of the context, and of the answer if the request says. `encode`: turns messages into a
    prompt. `goes_on`: the answer continues the last message.
    """
    tokens = await beside(lambda: encode(messages), characters(messages))
    context, max_tokens = room
    limit = prompt_limit(context, max_tokens)
    if policy == "error" or len(tokens) <= limit:
        return Fitted(tokens, None)

    def count(some: Seq[Message]) -> int:
        return len(encode(checked_messages(some)))

    if policy == "truncate-oldest":
        drop = await beside(lambda: turns_to_drop(messages, limit, count), characters(messages))
        kept: Seq[Message] = without_turns(messages, drop)
    else:
        given = policy(Overflow(messages, len(tokens), limit, context, count))
        kept = checked_messages(await given if inspect.isawaitable(given) else given)
        if goes_on and kept[-1]["role"] != "assistant":
            raise RequestError(
                "continue_final_message needs a last message of the role assistant; context_policy gave "
                "another",
                "messages",
            )
    rest = await beside(lambda: encode(kept), characters(kept))
    return Fitted(rest, max(len(messages) - len(kept), 0) or None)
