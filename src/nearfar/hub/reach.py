"""Checks quickly whether the hub can be reached, before its client tries for half a minute.

huggingface_hub 1.33 tries each request six times with pauses of up to 8 seconds, even if the host's name
cannot be resolved: that takes 31 seconds before the first message.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from nearfar.interruptible import Stopped, interruptible

PATIENCE = 2.0
"""Seconds for a connection, unless HF_HUB_ETAG_TIMEOUT is set: a network that drops packets to the hub counts
as none.
"""
REMEMBERED = 60.0
"""Seconds for which the result is reused: a command checks several times, and a server's network may come
back.
"""

_known: dict[str, tuple[float, str | None]] = {}


def host() -> str:
    """The name of the hub's host, or of the mirror that HF_ENDPOINT names."""
    from huggingface_hub import constants

    return urlsplit(constants.ENDPOINT).netloc or constants.ENDPOINT


def unreachable() -> str | None:
    """The reason why the hub cannot be reached; None where it can, or where only its client can find out.

    A proxy may reach what this machine cannot: where one is set for the host, only the proxy is tried.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    parts = urlsplit(constants.ENDPOINT)
    if not parts.hostname:
        return None
    proxy = _proxy(parts.scheme, parts.hostname)
    through = "from here" if proxy is None else f"through the proxy {proxy[0]}:{proxy[1]}"
    at = proxy or (parts.hostname, _port(parts))
    asked, reason = _known.get(constants.ENDPOINT, (float("-inf"), None))
    if time.monotonic() - asked > REMEMBERED:
        asked_for = "HF_HUB_ETAG_TIMEOUT" in os.environ
        reason = _trouble(at, constants.HF_HUB_ETAG_TIMEOUT if asked_for else PATIENCE)
        _known[constants.ENDPOINT] = time.monotonic(), reason
    return None if reason is None else f"{host()} cannot be reached {through} ({reason})"


def _proxy(scheme: str, name: str) -> tuple[str, int] | None:
    """Host and port of the proxy for a host, from the environment or the system's settings."""
    proxies = getproxies()
    given = proxies.get(scheme) or proxies.get("all")
    if not given or proxy_bypass(name):
        return None
    parts = urlsplit(given if "://" in given else f"http://{given}")
    return (parts.hostname, _port(parts)) if parts.hostname else None


def _port(parts: SplitResult) -> int:
    return parts.port or {"http": 80, "socks5": 1080, "socks5h": 1080}.get(parts.scheme, 443)


def _trouble(at: tuple[str, int], patience: float) -> str | None:
    """The reason why no connection can be made within `patience` seconds; None where one is made."""
    late = threading.Event()
    timer = threading.Timer(patience, late.set)
    timer.daemon = True
    timer.start()
    try:
        interruptible(lambda: socket.create_connection(at, patience).close(), late)
    except (Stopped, TimeoutError):
        return f"no answer in {patience:g} s"
    except OSError as error:
        return cause_of(error)
    finally:
        timer.cancel()
    return None


def cause_of(error: Exception) -> str:
    """Describe why a host cannot be reached."""
    if isinstance(error, socket.gaierror):
        return "its name is not found"
    if isinstance(error, ConnectionRefusedError):
        return "the connection is refused"
    if isinstance(error, TimeoutError):
        return "no answer"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
