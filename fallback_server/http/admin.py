"""Admin endpoints: figures, keys, requests under way. They need an admin's key, which opens nothing else."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter

from nearfar.fallback_server.http.errors import DESCRIBED, ApiError
from nearfar.fallback_server.http.keys import KeyStore
from nearfar.fallback_server.http.service import Service


def router(service: Service, keys: KeyStore | None) -> APIRouter:
    """Make the router of the endpoints under /admin."""
    api = APIRouter(prefix="/admin", responses=DESCRIBED)

    @api.get("/stats", response_model=None)
    async def stats() -> dict[str, Any]:
        """Return the figures of engine and admission; `tasks` counts the event loop's tasks, this one
        included.
        """
        admission = service.admission
        under_way = {"requests": admission.requests, "tokens": admission.tokens}
        return {
            "engine": asdict(service.engine.stats()),
            "under_way": under_way,
            "draining": service.draining,
            "tasks": len(asyncio.all_tasks()),
        }

    @api.get("/keys", response_model=None)
    async def list_keys() -> dict[str, Any]:
        """Return names, limits and use of all keys; never their hashes."""
        found = [asdict(key) for key in keys.keys] if keys else []
        for record in found:
            del record["hash"]
            record["under_way"] = service.admission.under_way(record["name"])
        return {"keys": found}

    @api.post("/keys/reload", response_model=None)
    async def reload_keys() -> dict[str, Any]:
        """Read the keys file now. An invalid file is rejected, and the present keys stay."""
        assert keys is not None  # without keys these routes do not exist
        keys.reload()
        return {"keys": len(keys.keys)}

    @api.get("/requests", response_model=None)
    async def requests() -> dict[str, Any]:
        """List the requests under way."""
        found = [
            {
                "id": call.name,
                "request_id": call.request.state.request_id,
                "key": call.wanted.tenant.name,
                "seconds": round(call.times.total, 3),
                "prompt_tokens": call.usage.prompt,
                "completion_tokens": call.usage.completion,
            }
            for call in dict.fromkeys(service.live.values())
        ]
        return {"requests": found}

    @api.delete("/requests/{name}", response_model=None)
    async def cancel(name: str) -> dict[str, Any]:
        """End a request, named by its answer's id or its X-Request-Id. Its client gets the answer so far with
        the finish reason abort, or an error where its API has no such reason.
        """
        call = service.live.get(name) or next(
            (each for each in service.live.values() if each.request.state.request_id == name), None
        )
        if call is None:
            raise ApiError(404, f"there is no request {name!r:.100} under way", None, "not_found")
        await call.cancel()
        return {"cancelled": name}

    return api
