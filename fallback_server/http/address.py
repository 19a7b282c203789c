"""Parameters in the address of a request (`?limit=5`): those that a path does not know are ignored by name,
or rejected by a strict server, as unknown fields of a body are.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import Request

from nearfar.errors import RequestError
from nearfar.fallback_server.http.ignoring import ignored
from nearfar.fallback_server.http.words import SHOWN, printable
from nearfar.suggestions import advised


def check_address(request: Request, known: Sequence[str]) -> None:
    """Name the unknown parameters of an address. `known`: the parameters that the path takes.

    Raises RequestError for a parameter that is given more than once, and, where unknown fields are rejected,
    for an unknown one.
    """
    given = [name for name, _ in request.query_params.multi_items()]
    for name in dict.fromkeys(given):
        if name in known:
            if (count := given.count(name)) > 1:
                raise RequestError(f"the address has {name} {count} times: give it once", name)
        elif (found := ignored.get()) is not None:
            found.add(f"?{name}")
        else:
            named = printable(name[:SHOWN])
            raise RequestError(f"unknown parameter {named} in the address{advised([name], known)}", named)
