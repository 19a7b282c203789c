"""The messages of a replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nearfar.errors import EngineError, NearfarError, OverloadError, RequestError
from nearfar.fallback_server.backend import BackendEvent, BackendStats


@dataclass(frozen=True)
class Events:
    """Events of a request since the last record. The last record also has the figures of the replica's
    engine.
    """

    events: tuple[BackendEvent, ...]
    replica: str
    stats: BackendStats | None = None


@dataclass(frozen=True)
class Refusal:
    """One of nearfar's errors as data: Ray would wrap an exception in its own."""

    kind: Literal["request", "overload", "engine"]
    message: str
    param: str | None = None
    retry_after: float = 0.0

    @classmethod
    def of(cls, error: Exception) -> Refusal:
        """Make the record of an error."""
        if isinstance(error, RequestError):
            return cls("request", str(error), error.param)
        if isinstance(error, OverloadError):
            return cls("overload", str(error), retry_after=error.retry_after)
        if isinstance(error, NearfarError):
            return cls("engine", str(error))
        return cls("engine", f"the engine failed: {type(error).__name__}: {error}")

    def error(self) -> NearfarError:
        """Rebuild the error."""
        match self.kind:
            case "request":
                return RequestError(self.message, self.param)
            case "overload":
                return OverloadError(self.message, self.retry_after)
            case "engine":
                return EngineError(self.message)
