"""ASGI middlewares: request ids and access log, the checked host, authentication, sizes and times of
bodies.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nearfar.fallback_server.http.errors import ApiError
from nearfar.fallback_server.http.keys import KeyStore
from nearfar.fallback_server.http.limits import Admission, ServerLimits
from nearfar.fallback_server.http.logs import request_id
from nearfar.fallback_server.tenants import ANONYMOUS, Tenant
from nearfar.hosts import answers_for, named_host

log = logging.getLogger(__name__)

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_ABSOLUTE = re.compile(r"https?://([^/?#]*)(/.*)?", re.IGNORECASE | re.DOTALL)
ASKED = ("/v1/", "/v2/", "/api/")
"""Prefixes of the paths of requests for an engine."""
TRACKED = "tracked"
"""The name in a request's state by which a call says that it counts and logs the request."""
_PROBES = ("/health", "/ready", "/metrics")


class Targets:
    """Replaces a target that is a whole address (GET http://host/v1/models, as proxies send it) by its path.
    Its host takes the place of the Host header (RFC 9112, 3.2.2).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http" and (whole := _ABSOLUTE.fullmatch(scope["path"])):
            host, path = whole[1], whole[2] or "/"
            others = [(name, value) for name, value in scope["headers"] if name != b"host"]
            raw = _ABSOLUTE.fullmatch(scope.get("raw_path", b"").decode("latin-1"))
            scope = {
                **scope,
                "path": path,
                "raw_path": ((raw and raw[2]) or path).encode("latin-1", errors="replace"),
                "headers": [(b"host", host.encode("latin-1", errors="replace")), *others],
            }
        await self._app(scope, receive, send)


class Paths:
    """Adds /v1 to a path of OpenAI's API that lacks it, and takes a slash from the end of any path: clients
    differ in the base address that they expect, and a redirect would lose the body of some.

    `paths`: the known paths, of which those below /v1 count.
    """

    def __init__(self, app: ASGIApp, paths: Collection[str]) -> None:
        self._app = app
        self._known = tuple(path.removeprefix("/v1") for path in paths if path.startswith("/v1/"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http":
            path = scope["path"].removesuffix("/") or "/"
            raw = (scope.get("raw_path") or path.encode()).removesuffix(b"/") or b"/"
            if self._lacks(path):
                path, raw = f"/v1{path}", b"/v1" + raw
            scope = {**scope, "path": path, "raw_path": raw}
        await self._app(scope, receive, send)

    def _lacks(self, path: str) -> bool:
        """Whether a path is one of these without /v1."""
        return any(path == known or path.startswith(f"{known}/") for known in self._known)


class HeadRequests:
    """Answers HEAD, which load balancers use, like GET; the HTTP server then sends no body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        head = scope["type"] == "http" and scope["method"] == "HEAD"
        await self._app({**scope, "method": "GET"} if head else scope, receive, send)


ID_HEADERS = ("x-request-id", "request-id")
"""Response headers with the id of a request: OpenAI's name and Anthropic's."""


class RequestIds:
    """Takes X-Request-Id from the client or makes one, returns it in the response under the names that
    clients of OpenAI and of Anthropic read, and logs one line per request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        made = given if _ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = made
        token = request_id.set(made)
        start, status = time.monotonic(), 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name in ID_HEADERS:
                    headers[name] = made
            await send(message)

        try:
            await self._app(scope, receive, tagged)
        finally:
            level = logging.DEBUG if scope["path"] in _PROBES else logging.INFO
            fields = {"method": scope["method"], "path": scope["path"], "status": status,
                      "seconds": round(time.monotonic() - start, 4)}  # fmt: skip
            log.log(level, "request", extra={"fields": fields})
            request_id.reset(token)


class Hosts:
    """Rejects requests for a host other than this server's: see nearfar.hosts."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._app, self._allowed = app, allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        given = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if given is None or answers_for(given, self._allowed):
            await self._app(scope, receive, send)
            return
        refused = ApiError(
            421,
            f"this server does not answer for the host {named_host(given)!a:.100}; start it with "
            "--allowed-host if it should",
            None,
            "wrong_host",
        )
        await refused.problem.response(scope["path"])(scope, receive, send)


class Authentication:
    """Admits users' keys to /v1 and admins' keys to /admin, before any of the body is read.

    Without a key store everybody may use /v1, and nobody /admin. With one, only probes need no key.
    """

    def __init__(self, app: ASGIApp, keys: KeyStore | None) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http" and scope["method"] != "OPTIONS":
            try:
                scope.setdefault("state", {})["tenant"] = self._tenant(scope)
            except ApiError as error:
                await error.problem.response(scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _tenant(self, scope: Scope) -> Tenant:
        path: str = scope["path"]
        admin = path.startswith("/admin")
        # Scrapers of metrics use an admin's key where the server has one.
        metrics = path == "/metrics" and self._keys is not None and self._keys.has_admin
        if path in _PROBES and not metrics:
            return ANONYMOUS
        if self._keys is None:
            if admin:
                raise ApiError(
                    403, "the admin endpoints need a server with keys (--keys)", None, "no_admin_key"
                )
            return ANONYMOUS
        headers = Headers(scope=scope)
        brought = headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}"
        key = self._keys.bearer(brought)
        if key is None:
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as 'Authorization: Bearer …' or 'x-api-key: …'",
                None,
                "invalid_api_key",
            )
        if key.admin != (admin or metrics):
            wanted = "an admin key" if admin or metrics else "a user key; this one is for /admin"
            raise ApiError(403, f"{path} needs {wanted}", None, "wrong_kind_of_key")
        return key.tenant


class Door:
    """Counts each request to the engine in its tenant's limits before the body is read, and removes it at the
    end.

    `turned_away` is called with the status of each rejected request that no call counts and logs (TRACKED).
    """

    def __init__(self, app: ASGIApp, admission: Admission, turned_away: Callable[[Scope, int], None]) -> None:
        self._app, self._admission, self._turned_away = app, admission, turned_away

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith(ASKED):
            await self._app(scope, receive, send)
            return
        try:
            ticket = await self._admission.enter(scope["state"]["tenant"])
        except ApiError as error:
            self._turned_away(scope, error.problem.status)
            await error.problem.response(scope["path"])(scope, receive, send)
            return
        scope["state"]["ticket"] = ticket

        async def noted(message: Message) -> None:
            begins = message["type"] == "http.response.start"
            if begins and message["status"] >= 400 and TRACKED not in scope["state"]:
                self._turned_away(scope, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            ticket.leave()


class Rests:
    """Reads the rest of a body before an answer that does not wait for it (413, 401). A connection that is
    closed with unread bytes is reset, and most clients then lose the answer.

    At most LARGEST times the largest body is read, for at most SECONDS.
    """

    LARGEST, SECONDS = 4, 5.0

    def __init__(self, app: ASGIApp, limits: ServerLimits) -> None:
        self._app, self._most = app, self.LARGEST * limits.body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        # With Expect: 100-continue a client waits for the answer before it sends.
        if "expect" in headers or not ("content-length" in headers or "transfer-encoding" in headers):
            await self._app(scope, receive, send)
            return
        more = True

        async def noted() -> Message:
            nonlocal more
            message = await receive()
            more = message.get("more_body", False)
            return message

        async def discard() -> None:
            size = 0
            while more and size <= self._most:
                size += len((await noted()).get("body", b""))

        async def answer(message: Message) -> None:
            if more and message["type"] == "http.response.start":
                with suppress(TimeoutError):
                    await asyncio.wait_for(discard(), self.SECONDS)
                MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        await self._app(scope, noted, answer)


class Sizes:
    """Rejects headers and bodies that are too large, and bodies that come too slowly.

    The HTTP parser already rejects headers that come in pieces, with the same limit.
    """

    def __init__(self, app: ASGIApp, limits: ServerLimits) -> None:
        self._app, self._limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = sum(len(name) + len(value) + 4 for name, value in scope["headers"]) + len(
            scope.get("raw_path", b"")
        )
        if headers > self._limits.header_bytes:
            refused = ApiError(
                431,
                f"the headers are larger than {self._limits.header_bytes} bytes",
                None,
                "headers_too_large",
            )
            await refused.problem.response(scope["path"])(scope, receive, send)
            return
        limit = self._limits.body_bytes
        length = Headers(scope=scope).get("content-length", "")
        if length.isdigit() and int(length[:20]) > limit:
            await _too_large(limit).problem.response(scope["path"])(scope, receive, send)
            return
        deadline = asyncio.get_running_loop().time() + self._limits.body_timeout
        size, complete = 0, False

        async def bounded() -> Message:
            nonlocal size, complete
            if complete:  # the client may be silent now, for as long as the answer takes
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise ApiError(
                    408,
                    f"the request's body did not come within {self._limits.body_timeout:g} s",
                    None,
                    "timeout",
                ) from None
            size += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if size > limit:
                raise _too_large(limit)
            return message

        await self._app(scope, bounded, send)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request's body is larger than {limit} bytes", None, "request_too_large")
