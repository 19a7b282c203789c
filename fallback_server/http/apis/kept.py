"""Keeps responses in memory, so that later requests can read and continue them (`store`,
`previous_response_id`).

They are bounded by count and by bytes. What exceeds the bounds is removed from the tenant with the most
bytes, its oldest first, so that one client cannot push out others' responses.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from nearfar.fallback_server.http.errors import ApiError
from nearfar.fallback_server.tenants import Tenant

Record = dict[str, Any]


@dataclass(frozen=True)
class KeptResponse:
    """A response, the items that it answered, and the conversation so far as messages of a chat."""

    record: Record
    items: list[Record]
    messages: list[Record]
    bytes: int = 0


class KeptResponses:
    """The responses of all tenants; a tenant finds only its own."""

    def __init__(self, most: int = 1024, most_bytes: int = 64 << 20) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._of: dict[str, OrderedDict[str, KeptResponse]] = {}
        self._count = self._bytes = 0

    def put(self, tenant: Tenant, record: Record, items: list[Record], messages: list[Record]) -> None:
        """Keep a response, unless it alone exceeds the limit of bytes."""
        size = len(json.dumps([record, items, messages]))
        if size > self._most_bytes:
            return
        self._of.setdefault(tenant.name, OrderedDict())[record["id"]] = KeptResponse(
            record, items, messages, size
        )
        self._count += 1
        self._bytes += size
        while self._count > self._most or self._bytes > self._most_bytes:
            self._drop_oldest()

    def find(self, tenant: Tenant, name: str, param: str | None = None) -> KeptResponse:
        """Return the response of this id. Raises ApiError with 404 (400 for a field `param`) where there is
        none.
        """
        found = self._of[tenant.name].get(name) if tenant.name in self._of else None
        if found is not None:
            return found
        raise ApiError(
            404 if param is None else 400,
            f"there is no response {name!r:.100} here: the newest {self._most:,} are kept in memory until "
            "the server ends, unless store was false; send the whole conversation as input",
            param,
            "response_not_found" if param is None else "previous_response_not_found",
        )

    def remove(self, tenant: Tenant, name: str) -> None:
        """Remove a response. Raises ApiError with 404 where there is none."""
        gone = self.find(tenant, name)
        del self._of[tenant.name][name]
        self._forget(tenant.name, gone)

    def _drop_oldest(self) -> None:
        largest = max(self._of, key=lambda name: sum(kept.bytes for kept in self._of[name].values()))
        _, gone = self._of[largest].popitem(last=False)
        self._forget(largest, gone)

    def _forget(self, tenant: str, gone: KeptResponse) -> None:
        self._count -= 1
        self._bytes -= gone.bytes
        if not self._of[tenant]:
            del self._of[tenant]
