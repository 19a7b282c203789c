"""Prefix-aware routing: a Serve request router that prefers the replica whose cache has the prompt's
beginning.

Serve makes one in each process that holds a handle, through its public interface (`ray.serve.request_router`,
in alpha). Serve's own prefix router is for its LLM deployments and expects their requests.
"""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from nearfar.fallback_server.backend import TokenRequest
from nearfar.fallback_server.prefixes import PrefixMap, token_blocks
from nearfar.fallback_server.ray_engine.options import RayOptions

TRIED = 2
"""Replicas without the prefix that are compared by load (the power of two choices)."""


class PrefixRouter(RequestRouter):
    """Prefers the replica that knows the most of the prompt unless it is much busier than the least busy one;
    else takes one of two.
    """

    def initialize_state(self, slack: int = RayOptions.slack, **_: Any) -> None:
        """Set up the state. See RequestRouter; `slack` as in RayOptions."""
        self._slack = slack
        self._prefixes: PrefixMap[str] = PrefixMap()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return ranks of replicas; within a rank, Serve takes the one with the shortest queue that has
        room.
        """
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        others = random.sample(candidate_replicas, min(TRIED, len(candidate_replicas)))
        known = self._known(candidate_replicas, pending_request)
        return [[known], others] if known is not None else [others]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """See RequestRouter."""
        if (request := _request(pending_request)) is not None:
            self._prefixes.remember(token_blocks(request.tokens, request.salt), replica_id.unique_id)

    def _known(
        self, candidates: list[RunningReplica], pending: PendingRequest | None
    ) -> RunningReplica | None:
        request = _request(pending)
        if request is None:
            return None
        lengths = {replica.replica_id.unique_id: self._length(replica) for replica in candidates}
        by_name = {replica.replica_id.unique_id: replica for replica in candidates}
        for name in self._prefixes.known(token_blocks(request.tokens, request.salt)):
            if name in by_name and lengths[name] <= min(lengths.values()) + self._slack:
                return by_name[name]
        return None

    def _length(self, replica: RunningReplica) -> int:
        return self.replica_queue_len_cache.get(replica.replica_id) or 0


def _request(pending: PendingRequest | None) -> TokenRequest | None:
    """The token request of a pending call; None for other calls."""
    first = pending.args[0] if pending is not None and pending.args else None
    return first if isinstance(first, TokenRequest) else None
