"""The fields of a request that only a service reads, for every client, in Python and TypeScript."""

from __future__ import annotations

SERVICE_FIELDS = (
    "model",
    "user",
    "metadata",
    "store",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
)
"""Fields that a client of a service and a device sends to the service alone. The device rejects every other
field that it does not know.
"""
