"""The child's side: reads jobs from stdin and writes answers to stdout, as framed JSON."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nearfar.errors import NearfarError, RequestError
from nearfar.fallback_server import framing

_PR_SET_PDEATHSIG = 1
Handler = Callable[[dict[str, Any]], dict[str, Any]]


def serve(open_handler: Callable[[dict[str, Any]], Handler]) -> None:
    """Answer jobs until stdin ends, as it does when the parent dies. `open_handler` loads what jobs need."""
    settings = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when this process ends
    _die_with_parent()
    _limit_memory(settings["memory"])
    # Output that a library prints must not mix with the answers.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    source = sys.stdin.buffer
    try:
        handler = open_handler(settings)
    except NearfarError as error:
        _write(out, {"error": str(error)})
        return
    _write(out, {"ready": True})
    while (message := framing.receive(source)) is not None:
        asked = json.loads(message)
        with _limited_time(settings["processor_seconds"]):
            answer = _answer(handler, asked["job"])
        _write(out, {"number": asked["number"], "answer": answer})


def _answer(handler: Handler, job: dict[str, Any]) -> dict[str, Any]:
    try:
        return handler(job)
    except RequestError as error:
        return {"error": str(error), "param": error.param}
    except MemoryError:
        return {
            "error": "the request needs more memory than the server gives to one request; make it smaller"
        }
    except RecursionError:
        return {"error": "the request is nested too deeply; make it flatter"}
    except (
        Exception
    ) as error:  # any error that a template or a library raises for such input is the request's error
        return {"error": f"{type(error).__name__}: {error}"}


def _write(out: Any, answer: dict[str, Any]) -> None:
    try:
        out.write(framing.framed(json.dumps(answer).encode()))
        out.flush()
    except BrokenPipeError:  # the parent is gone, for example after Ctrl-C while this process was loading
        os._exit(0)


def _die_with_parent() -> None:
    """End this process when the parent dies. Between jobs the end of stdin does it; during a job that never
    ends, only the kernel can (Linux).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def _limited_time(seconds: float) -> Iterator[None]:
    """End this process with SIGPROF when the block takes more than `seconds` of processor time, in whatever
    library it is. The clock on the wall would also count the time that the machine gives to others.
    """
    if not hasattr(signal, "setitimer"):  # Windows: the parent bounds the time by the clock
        yield
        return
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_memory(size: int) -> None:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))
