"""Reports how much of the prompts has been read while requests wait for their first token."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nearfar.edge_runtime.engine.requests import Request


class PromptProgress:
    """Counts the tokens that are read, and all tokens, of the prompts that wait for their first token."""

    def __init__(self) -> None:
        self.tell: Callable[[int, int], None] | None = None
        """Called with tokens read and tokens in all, both including cached tokens; the last call has equal
        numbers.
        """
        self._told = (0, 0)

    def update(self, requests: Iterable[Request]) -> None:
        """Update the counts. `requests`: all admitted requests that have no token yet."""
        waiting = list(requests)
        done = sum(max(request.read, request.cached_tokens) for request in waiting)
        total = sum(len(request.prompt) for request in waiting)
        before, self._told = self._told, (done, total)
        if self.tell is None or before == self._told:
            return
        if total:
            self.tell(done, total)
        else:
            self.tell(before[1], before[1])
