"""Checks whether a request's `Host` header names a server of ours.

A page of any site can make its own name resolve to 127.0.0.1 (DNS rebinding) and then read, as its own
origin, the answers of a server on this machine; the name in `Host` reveals that. A request without a Host is
HTTP/1.0, which no browser sends.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable

from nearfar.errors import RequestError

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:\d+)?", re.ASCII)
_DEFAULTS = (("http:", ":80"), ("https:", ":443"))
_PORT = re.compile(r"\.?(:\d*)?\Z")
"""The end of a Host that does not belong to the name: the root's dot and a port."""


def is_local(host: str) -> bool:
    """Whether a server at this address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bracketed(host: str) -> str:
    """An address as URLs and `Host` write it: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def answered_hosts(host: str, more: Iterable[str]) -> tuple[str, ...]:
    """The names that a server at `host` answers for, `more` included; empty: all names.

    A server that only this machine reaches has no other protection from pages of other sites: it answers for
    this machine's names. A server that others reach may have any name. "*" in `more`: all names.
    """
    given = tuple(more)
    if "*" in given or not (given or is_local(host)):
        return ()
    return ("localhost", "127.0.0.1", "[::1]", bracketed(host), *given)


def named_host(given: str) -> str:
    """The name in a Host header, without port and trailing dot."""
    return _PORT.sub("", given.strip().lower())


def answers_for(given: str | None, names: Collection[str]) -> bool:
    """Whether a request's Host (None: it has none) is among `answered_hosts`."""
    return not names or given is None or named_host(given) in {named_host(name) for name in names}


def check_origin(given: str) -> None:
    """Raise RequestError for what no browser sends as the origin of a page. "*" is any origin, and "null" is
    that of a page without one.
    """
    ported = any(given.startswith(scheme) and given.endswith(port) for scheme, port in _DEFAULTS)
    if given in ("*", "null") or (_ORIGIN.fullmatch(given) and not ported):
        return
    raise RequestError(
        f"--cors takes an origin as browsers send it, such as https://app.example or http://localhost:3000 "
        f"(scheme and host in lower case, a port only where it is not the scheme's own, no path), or *, not "
        f"{given!r:.100}",
        "cors",
    )
