"""Parts of lists, as OpenAI's list paths take them: `limit`, `order` and `after` in the address."""

from __future__ import annotations

from collections.abc import Sequence

from nearfar.errors import RequestError
from nearfar.fallback_server.http.apis.asking import Record

MOST, USUAL = 100, 20
"""The most records of a page, and the records of a page whose size is not given."""
ORDERS = ("desc", "asc")
"""The newest first, which is the default, and the oldest first."""


def page_of(records: Sequence[Record], limit: str, order: str, after: str | None) -> Record:
    """Return a page of records, the oldest of which is the first. Raises RequestError for a value that the
    list does not take.
    """
    if not (limit.isdecimal() and limit.isascii() and 1 <= int(limit[:9]) <= MOST):
        raise RequestError(f"limit must be a whole number from 1 to {MOST}, not {limit!a:.40}", "limit")
    if order not in ORDERS:
        raise RequestError(f"order must be asc or desc, not {order!a:.40}", "order")
    records = records if order == "asc" else records[::-1]
    start = 0
    if after is not None:
        at = next((at for at, record in enumerate(records) if record["id"] == after), None)
        if at is None:
            raise RequestError(f"after must be the id of an item of this list, not {after!a:.100}", "after")
        start = at + 1
    page = records[start : start + int(limit)]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {
        "object": "list", "data": page, "first_id": first, "last_id": last,
        "has_more": start + len(page) < len(records),
    }  # fmt: skip
