"""Answers requests while the model is loaded: that the server lives, what it waits for, and "try again"."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from nearfar.edge_runtime.progress import Progress, Tell
from nearfar.fallback_server.http.errors import Problem
from nearfar.fallback_server.http.middleware import Hosts, RequestIds

RETRY_SECONDS = 2.0


class OpeningApp:
    """An app that answers until the real one exists. `tell` takes the progress; then set `app`."""

    def __init__(self, hosts: Collection[str], tell: Tell | None = None) -> None:
        """`hosts`: the host names that it answers for; none means all. `tell`: also receives the progress,
        until there is an app.
        """
        self.app: ASGIApp | None = None
        self.progress = Progress("starting")
        self._tell = tell
        self._meanwhile: ASGIApp = RequestIds(Hosts(self._loading, hosts) if hosts else self._loading)

    def tell(self, progress: Progress) -> None:
        """See nearfar.edge_runtime.progress.Tell."""
        if self.app is None:
            self.progress = progress
            if self._tell is not None:
                self._tell(progress)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        await (self.app or self._meanwhile)(scope, receive, send)

    async def _loading(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._answer(scope["path"])(scope, receive, send)

    def _answer(self, path: str) -> Response:
        state = {"status": "loading", "waiting_for": str(self.progress), **asdict(self.progress)}
        if path == "/health":
            return JSONResponse(state)
        if path == "/ready":
            return JSONResponse(state, 503, {"Retry-After": f"{RETRY_SECONDS:.0f}"})
        problem = Problem(
            503,
            f"the model is not loaded yet ({self.progress}): try again in a moment; /ready says when",
            None,
            "loading",
            RETRY_SECONDS,
        )
        return problem.response()
