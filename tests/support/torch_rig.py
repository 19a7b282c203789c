"""The torch engine without its process: takes requests, and gives all their events."""

from __future__ import annotations

import functools
import hashlib
import queue
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearfar.edge_runtime.grammars import key_of
from nearfar.errors import RequestError
from nearfar.fallback_server.backend import BackendEvent, Sampling, TokenRequest
from nearfar.fallback_server.grammars.compiled import compiler, vocabulary
from nearfar.fallback_server.torch_engine.messages import FromWorker, Learn, RefusedRequest, Stepped, Submit
from nearfar.fallback_server.torch_engine.options import TorchOptions
from nearfar.fallback_server.torch_engine.requests import checked
from tests.support.late import late

if TYPE_CHECKING:
    from nearfar.fallback_server.torch_engine.engine import LoadedGrammar
    from nearfar.fallback_server.torch_engine.model import PagedModel

engines = late("nearfar.fallback_server.torch_engine.engine")
models = late("nearfar.fallback_server.torch_engine.model")

GREEDY = Sampling(temperature=0.0)


_LOADED: dict[tuple[bytes, bool], PagedModel] = {}


def model(path: Path, native: bool = True) -> PagedModel:
    """The model of a folder in float32, loaded once a process for all folders with the same files."""
    key = (_content(path), native)
    if key not in _LOADED:
        options = TorchOptions(device="cpu", dtype="float32", native=native)
        _LOADED[key] = models.load_model(path, options)
    return _LOADED[key]


def _content(folder: Path) -> bytes:
    """A digest of the names and bytes of all files. pytest can use a removed folder's path again."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        for part in (file.relative_to(folder).as_posix().encode(), file.read_bytes()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


class Rig:
    """An engine with its own cache over a model that others use too."""

    def __init__(self, path: Path, *, pages: int | None = None, **options: Any) -> None:
        loaded = model(path, options.get("native", True))
        self.options = TorchOptions(device="cpu", **options)
        if pages is not None:
            probe = models.make_cache(loaded, self.options)
            page_bytes = sum(t[0].nbytes for t in (*probe.keys, *probe.values))
            self.options = TorchOptions(device="cpu", cache_bytes=pages * page_bytes, **options)
        facts = loaded.facts
        self.compile = functools.cache(
            lambda: compiler(vocabulary(path, facts.vocab_size, facts.eos_token_ids))
        )
        self.said: list[FromWorker] = []
        self.inbox: queue.SimpleQueue[LoadedGrammar] = queue.SimpleQueue()
        self.engine = engines.TorchEngine(
            loaded,
            models.make_cache(loaded, self.options),
            path,
            self.options,
            self.said.append,
            self.inbox.put,
        )

    def submit(self, request: TokenRequest) -> None:
        """Check and queue a request, with its grammar compiled."""
        request = checked(request, self.engine.info, self.options)
        key = None
        if request.grammar is not None:
            key = key_of(request.grammar)
            self.engine.handle(Learn(key, self.compile()(request.grammar).serialize_json()))
        self.engine.handle(Submit(request, key))

    def events(self, request_id: str) -> list[BackendEvent]:
        """The events of a request so far; raises the error with which it was rejected."""
        found = []
        for message in self.said:
            if isinstance(message, Stepped):
                found += [event for owner, event in message.events if owner == request_id]
            if isinstance(message, RefusedRequest) and message.id == request_id:
                raise RequestError(message.message, message.param)
        return found

    def run(self, requests: Sequence[TokenRequest]) -> list[list[BackendEvent]]:
        """Run these requests together; gives all their events."""
        for request in requests:
            self.submit(request)
        for _ in range(20_000):
            while self.engine.counters.waiting and not self.engine.busy:  # a grammar is still being compiled
                self.engine.handle(self.inbox.get(timeout=60))
            if not self.engine.busy:
                break
            self.engine.turn()
        return [self.events(request.id) for request in requests]

    def tokens(self, requests: Sequence[TokenRequest]) -> list[list[int | None]]:
        """Run these requests together; gives their tokens."""
        return [[event.token for event in events] for events in self.run(requests)]

    def assert_empty(self) -> None:
        """Nothing is under way and no page is held."""
        assert not self.engine.busy
        assert not any(self.engine.scheduler.table.allocators[0].refs)
        assert not self.engine._active
        assert not self.engine._loading
