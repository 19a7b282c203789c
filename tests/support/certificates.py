"""One SSL context for all HTTP clients of a test process.

Each client of httpx makes a context of its own, which reads every certificate of the system: 20 ms of CPU,
also for plain HTTP. The tests make thousands of clients.
"""

from __future__ import annotations

import os
import ssl
from functools import cache
from typing import Any

import httpx
from httpx._transports import default

_make = default.create_ssl_context


def share() -> None:
    """Give clients with the same certificates the same context, from now on."""
    default.create_ssl_context = httpx.create_ssl_context = _shared


def _shared(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    if verify is not True or cert is not None:
        return _make(verify=verify, cert=cert, trust_env=trust_env)
    return _of(trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@cache
def _of(trust_env: bool, file: str | None, folder: str | None) -> ssl.SSLContext:
    """The context of these certificates: the variables of the environment are part of the key."""
    return _make(trust_env=trust_env)
