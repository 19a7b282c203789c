"""What an answer with an error status, or no answer, means for the one who asked: refuse, ask another,
wait.
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
"""vLLM's words of an overflow, and SGLang's; llama.cpp's type of the error is exceed_context_size_error."""
_BAD = (400, 413, 422)
_ABSENT = (404, 405, 501)
_BRIEFLY = {
    "timeout": "no answer in time",
    "shape": "its answer has not the right shape",
    "cut": "the connection was cut",
    "error": "it told an error in the middle of an answer",
}
A_PAGE = "a web page, so another kind of server is there: check the address and its port"
TEXT = 2000
"""Characters that are kept of a message."""


class RemoteError(NearfarError):
    """A server failed, or cannot take this call: another may do better.

    The message names the address and says what came from there: it is for who gave the address and the
    prompt. Logs have `briefly` alone. `code` is short: the status, or timeout, connection, cut, shape, error.
    `retry_after`: seconds that the server asked for. `web_page`: that is all that came with the status.
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
        """Whether the server works, and only takes nothing now."""
        return self.status == 429

    @property
    def absent(self) -> bool:
        """Whether the server has no such path or model."""
        return self.status in _ABSENT

    @property
    def broken(self) -> bool:
        """Whether this says that the server does not work. That it lacks something, or does not let us in,
        does not.
        """
        return self.status is None or (self.status >= 500 and not self.absent)


class FewerAnswersError(RemoteError):
    """The server gave some answers of one call to their end, and of the others nothing: it does not know `n`,
    as Ollama and transformers serve do not. That is no failure of the server.
    """

    def __init__(self, where: str, asked: int, missing: Sequence[int]) -> None:
        super().__init__(f"{where}: {asked - len(missing)} of {asked} answers were given", "fewer")
        self.missing = missing

    @property
    def broken(self) -> bool:
        """See RemoteError."""
        return False


class RefusedError(RequestError):
    """The server works, and says that the request is wrong: every other would say so too. `code`: the
    server's, if it gave one.
    """

    def __init__(self, message: str, param: str | None, status: int, code: str | None = None) -> None:
        super().__init__(message, param)
        self.status = status
        self.code = code or RequestError.code


def error_of(where: str, status: int, text: str, headers: Mapping[str, str]) -> RemoteError | RefusedError:
    """The error of a status and of the body that came with it, which may be anything."""
    told = _told(text)
    if status in _BAD:  # clients see this: an error page of something in between is not for them
        message = told.message or f"the server refuses the request (status {status})"
        return RefusedError(message, told.param, status, told.code)
    shown = f"{where}: status {status}: {told.message or shown_page(text)}"
    seconds, page = _seconds(headers), not told.message and _is_page(text)
    return RemoteError(shown, str(status), status=status, retry_after=seconds, web_page=page)


def event_error(where: str, error: object) -> RemoteError | RefusedError:
    """The error that an event of a stream tells. One with a status (vLLM's `code`) means what the status
    means.

    A request that turns out to be wrong on the way (OpenAI's `type`) is no fault of the server, and wrong
    everywhere.
    """
    fields = error if isinstance(error, dict) else {}
    status = 400 if fields.get("type") == "invalid_request_error" else fields.get("code")
    if isinstance(status, int) and 400 <= status < 600:
        return error_of(where, status, json.dumps({"error": fields}), {})
    kind = fields.get("type") or status or "error"
    return RemoteError(f"{where}: {kind}: {fields.get('message', error)}"[:TEXT], "error")


def shown_page(text: str) -> str:
    """What is shown of a body that has not OpenAI's shape: of a page, that it is one."""
    return A_PAGE if _is_page(text) else " ".join(text[:200].split())


def _is_page(text: str) -> bool:
    return text.lstrip()[:9].lower().startswith(("<!doctype", "<html"))


def briefly(error: RemoteError | RefusedError) -> str:
    """What is wrong with a server, in words of ours: what comes from a server may quote a private text."""
    if error.status is not None:
        page = isinstance(error, RemoteError) and error.web_page
        return f"status {error.status}" + (f": {A_PAGE}" if page else "")
    if error.code == "connection" and error.__cause__ is not None:
        return no_tls(error.__cause__) or reason_of(error.__cause__)
    return _BRIEFLY.get(error.code, "it failed")


def unreachable(where: str, error: Exception) -> str:
    """What is said of a server that no connection comes about with."""
    if said := no_tls(error):
        return f"{where} {said}"
    if type(error).__name__ == "UnsupportedProtocol":  # httpx's, which is not imported for this
        return f"{where.rstrip('/')} is no address of a server: give http://HOST:PORT or https://HOST"
    return f"{where} cannot be reached: {reason_of(error)}"


def no_tls(error: BaseException) -> str:
    """Say that a server speaks no TLS, by OpenSSL's name for its answer; empty for another error."""
    return "speaks no TLS: is it http:// and not https://?" if "WRONG_VERSION_NUMBER" in str(error) else ""


def reason_of(error: BaseException) -> str:
    """Why there is no connection: in the system's words, which the libraries in between leave out."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, OSError) and at.errno is not None:  # a gaierror's numbers are not errno's
            said = at.strerror if isinstance(at, socket.gaierror) else os.strerror(at.errno)
            return (said or "").lower() or type(at).__name__
        at = at.__cause__ or at.__context__
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class _Told:
    """What the body of an error says; empty where it has none of the shapes that are known."""

    message: str = ""
    param: str | None = None
    code: str | None = None


def _told(text: str) -> _Told:
    """OpenAI's error under `error`, or its fields by themselves (SGLang), or a text in its place (TGI, LM
    Studio), or FastAPI's `detail`.
    """
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return _Told()
    if isinstance(record, list) and len(record) == 1:  # Google's servers of OpenAI's shape
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
    return _Told(message[:TEXT], param if isinstance(param, str) else None, _code(error, message))


def _detail(detail: object) -> object:
    """FastAPI's words: a text, or a list of errors that have `msg`."""
    if not isinstance(detail, list):
        return detail
    return "; ".join(str(one["msg"]) for one in detail if isinstance(one, dict) and "msg" in one)


def _code(error: Mapping[str, object], message: str) -> str | None:
    """The error's code where it is one for programs (vLLM gives the status); that of an overflow also where
    the server says it in another way.
    """
    code = error.get("code")
    overflows = any(words in message.lower() for words in _OVERFLOWS)
    if overflows or "exceed_context_size_error" in (code, error.get("type")):
        return CONTEXT_CODE
    return code if isinstance(code, str) and _CODE.fullmatch(code) else None


def _seconds(headers: Mapping[str, str]) -> float | None:
    """Retry-After in seconds; a date is taken for none, for clocks differ."""
    try:
        found = float(headers["retry-after"])
    except (KeyError, ValueError):
        return None
    return min(max(found, 0.0), 86400.0) if found == found else None
