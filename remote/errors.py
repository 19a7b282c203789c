"""Classifies error statuses and failed connections by what the caller should do: reject the request, try
another server, or wait.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nearfar.errors import CONTEXT_CODE, NearfarError, RequestError

_CODE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_OVERFLOWS = ("maximum context length", "is longer than the model's context length")
"""Messages of a context overflow from vLLM and SGLang; llama.cpp has the error type
exceed_context_size_error.
"""
_BAD = (400, 413, 422)
_ABSENT = (404, 405, 501)
_BRIEFLY = {
    "timeout": "no answer in time",
    "shape": "its answer does not have the right shape",
    "cut": "the connection was cut",
    "error": "it reported an error in the middle of an answer",
}
A_PAGE = "a web page, so another kind of server is there: check the address and its port"
TEXT = 2000
"""Most characters of a message that are kept."""


class RemoteError(NearfarError):
    """A server failed, or cannot take this call; another server may.

    The message names the address and quotes the server: it is for whoever gave the address and the prompt.
    Logs use `briefly` only. `code` is short: the status, or timeout, connection, cut, shape, error.
    `retry_after`: seconds that the server requested. `web_page`: a web page came with the status, and nothing
    else.
    """

    def __init__(
        self,
        message: str,
        code: str,
        *,
        status: int | None = None,
        retry_after: float | None = None,
        web_page: bool = False,
    ) -> None:
        super().__init__(message)
        self.code, self.status, self.retry_after, self.web_page = code, status, retry_after, web_page

    @property
    def busy(self) -> bool:
        """Whether the server works, but takes no more requests now."""
        return self.status == 429

    @property
    def absent(self) -> bool:
        """Whether the server has no such path or model."""
        return self.status in _ABSENT

    @property
    def broken(self) -> bool:
        """Whether the error shows that the server does not work. A missing path or model, or a missing right,
        does not show that.
        """
        return self.status is None or (self.status >= 500 and not self.absent)


class FewerAnswersError(RemoteError):
    """The server completed some answers of a call and gave nothing of the others: it does not support `n`
    (Ollama and transformers serve do not). This is not a failure of the server.
    """

    def __init__(self, where: str, asked: int, missing: Sequence[int]) -> None:
        super().__init__(f"{where}: {asked - len(missing)} of {asked} answers were given", "fewer")
        self.missing = missing

    @property
    def broken(self) -> bool:
        """See RemoteError."""
        return False


class RefusedError(RequestError):
    """The server works and rejects the request as wrong; every other server would too. `code` and
    `kind` (OpenAI's `type`): the server's, if it gave any.
    """

    def __init__(
        self, message: str, param: str | None, status: int, code: str | None = None, kind: str | None = None
    ) -> None:
        super().__init__(message, param)
        self.status, self.kind = status, kind
        self.code = code or RequestError.code


def error_of(where: str, status: int, text: str, headers: Mapping[str, str]) -> RemoteError | RefusedError:
    """Make the error for a status and its body, which may be anything."""
    told = _told(text)
    if status in _BAD:  # clients see this message: the error page of a proxy in between is not for them
        message = told.message or f"the server rejects the request (status {status})"
        return RefusedError(message, told.param, status, told.code, told.kind)
    shown = f"{where}: status {status}: {told.message or shown_page(text)}"
    seconds, page = _seconds(headers), not told.message and _is_page(text)
    return RemoteError(shown, str(status), status=status, retry_after=seconds, web_page=page)


def event_error(where: str, error: object) -> RemoteError | RefusedError:
    """Make the error for an error event of a stream. An event with a status (vLLM's `code`) means the same as
    the status.

    A request that turns out to be wrong during the answer (OpenAI's `type`) is not a fault of the server, and
    wrong everywhere.
    """
    fields = error if isinstance(error, dict) else {}
    status = 400 if fields.get("type") == "invalid_request_error" else fields.get("code")
    if isinstance(status, int) and 400 <= status < 600:
        return error_of(where, status, json.dumps({"error": fields}), {})
    kind = fields.get("type") or status or "error"
    return RemoteError(f"{where}: {kind}: {fields.get('message', error)}"[:TEXT], "error")


def shown_page(text: str) -> str:
    """Shorten a body that has not OpenAI's shape for a message; a web page is only named as such."""
    return A_PAGE if _is_page(text) else " ".join(text[:200].split())


def _is_page(text: str) -> bool:
    return text.lstrip()[:9].lower().startswith(("<!doctype", "<html"))


def briefly(error: RemoteError | RefusedError) -> str:
    """Describe a server's error in our own words: the server's message may quote a private text."""
    if error.status is not None:
        page = isinstance(error, RemoteError) and error.web_page
        return f"status {error.status}" + (f": {A_PAGE}" if page else "")
    if error.code == "connection" and error.__cause__ is not None:
        return no_tls(error.__cause__) or reason_of(error.__cause__)
    return _BRIEFLY.get(error.code, "it failed")


def unreachable(where: str, error: Exception) -> str:
    """The message for a server that cannot be connected to."""
    if said := no_tls(error):
        return f"{where} {said}"
    # httpx's class, compared by name so that httpx is not imported for it
    if type(error).__name__ == "UnsupportedProtocol":
        return f"{where.rstrip('/')} is not the address of a server: give http://HOST:PORT or https://HOST"
    return f"{where} cannot be reached: {reason_of(error)}"


def no_tls(error: BaseException) -> str:
    """The message for a server that speaks no TLS, recognized by OpenSSL's error name; "" for another
    error.
    """
    return "speaks no TLS: is it http:// and not https://?" if "WRONG_VERSION_NUMBER" in str(error) else ""


def reason_of(error: BaseException) -> str:
    """Why there is no connection, in the operating system's words, which the libraries in between leave
    out.
    """
    at: BaseException | None = error
    while at is not None:
        # the numbers of a gaierror are not those of errno
        if isinstance(at, OSError) and at.errno is not None:
            said = at.strerror if isinstance(at, socket.gaierror) else os.strerror(at.errno)
            return (said or "").lower() or type(at).__name__
        at = at.__cause__ or at.__context__
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class _Told:
    """The contents of an error body; empty where it has no known shape."""

    message: str = ""
    param: str | None = None
    code: str | None = None
    kind: str | None = None


def _told(text: str) -> _Told:
    """Parse OpenAI's error under `error`, its fields at the top (SGLang), a text in its place (TGI, LM
    Studio), or FastAPI's `detail`.
    """
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return _Told()
    # Google's servers of OpenAI's interface wrap an error in a list
    if isinstance(record, list) and len(record) == 1:
        record = record[0]
    error = record.get("error", record) if isinstance(record, dict) else None
    if isinstance(error, str):
        error = {**record, "message": error}
    if not isinstance(error, dict):
        return _Told()
    message = error.get("message") or _detail(error.get("detail"))
    if not isinstance(message, str) or not message:
        return _Told()
    param = error.get("param")
    kind = error.get("type")
    return _Told(
        message[:TEXT],
        param if isinstance(param, str) else None,
        _code(error, message),
        kind if isinstance(kind, str) and _CODE.fullmatch(kind) else None,
    )


def _detail(detail: object) -> object:
    """FastAPI's message: a text, or a list of errors that have `msg`."""
    if not isinstance(detail, list):
        return detail
    return "; ".join(str(one["msg"]) for one in detail if isinstance(one, dict) and "msg" in one)


def _code(error: Mapping[str, object], message: str) -> str | None:
    """The error's code if it is a name (vLLM gives the status instead). Every form of a context overflow gets
    the same code.
    """
    code = error.get("code")
    overflows = any(words in message.lower() for words in _OVERFLOWS)
    if overflows or "exceed_context_size_error" in (code, error.get("type")):
        return CONTEXT_CODE
    return code if isinstance(code, str) and _CODE.fullmatch(code) else None


def _seconds(headers: Mapping[str, str]) -> float | None:
    """Retry-After in seconds; None for a date, since clocks differ."""
    try:
        found = float(headers["retry-after"])
    except (KeyError, ValueError):
        return None
    return min(max(found, 0.0), 86400.0) if found == found else None
