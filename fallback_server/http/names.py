"""The client's own names of the fields of a chat completion.

Requests of all APIs are answered as completions, so the faults that an engine finds are named after a
completion's fields. Here they get the names that the request has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastapi import Request

from nearfar.edge_runtime.openai.responses.asking import joined

FORMS = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip
"""The fields of a completion that may have the form of its answer."""
_LIMITS = ("max_completion_tokens", "max_tokens")
_COMPLETION = {"response_format": FORMS, "max_completion_tokens": _LIMITS, "max_tokens": _LIMITS}
_ANTHROPIC = {
    "response_format": ("output_config.format", "output_format"),
    "reasoning_effort": ("output_config.effort",),
    "max_completion_tokens": ("max_tokens",),
    "parallel_tool_calls": ("tool_choice.disable_parallel_tool_use",),
    "stop": ("stop_sequences",),
}
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop",
)  # fmt: skip
_OLLAMA = {
    "response_format": ("format",),
    "repetition_penalty": ("options.repeat_penalty",),
    "max_completion_tokens": ("options.num_predict",),
    "max_tokens": ("options.num_predict",),
    **{name: (f"options.{name}",) for name in _SAMPLING},
}
_RESPONSE = {
    "messages": ("input", "previous_response_id", "instructions"),
    "response_format": ("text.format",),
    "reasoning_effort": ("reasoning.effort",),
    "verbosity": ("text.verbosity",),
    "max_completion_tokens": ("max_output_tokens",),
    "max_tokens": ("max_output_tokens",),
}
NAMES: Mapping[str, Mapping[str, Sequence[str]]] = {
    "/v1/chat/completions": _COMPLETION,
    "/v1/completions": _COMPLETION,
    "/v1/responses": _RESPONSE,
    "/v1/responses/input_tokens": _RESPONSE,
    "/v1/messages": _ANTHROPIC,
    "/v1/messages/count_tokens": _ANTHROPIC,
    "/v1/decisions": {"messages": ("input",)},
    "/api/chat": _OLLAMA,
    "/api/generate": {**_OLLAMA, "messages": ("prompt", "system")},
    "/api/embeddings": {"input": ("prompt",)},
}
"""By path and by the name in a completion: the fields of the request that may be meant. The first one that
was sent is named.
"""

_OF_TOOL = re.compile(r"tools: the JSON schema of '([\w.-]+)' ")
"""The beginning of an error about the schema of one tool."""


_IMAGES = {
    "/v1/messages": "image", "/v1/messages/count_tokens": "image", "/v1/responses": "input_image",
    "/v1/responses/input_tokens": "input_image", "/api/chat": "images", "/api/generate": "images",
}  # fmt: skip
"""By path: the client's name of an image, which is an `image_url` in a completion."""


def own_names(request: Request, names: Iterable[str]) -> list[str]:
    """Return the client's names of fields of a completion."""
    known, sent = NAMES.get(request.url.path, {}), getattr(request.state, "sent", None)
    return [_own(known.get(name, (name,)), sent) for name in names]


def turn(request: Request) -> None:
    """Note that a request of another API is turned into a chat completion."""
    request.state.as_chat = True


def was_turned(request: Request) -> bool:
    """Whether a request of another API was turned into a chat completion, whose names an upstream uses."""
    return getattr(request.state, "as_chat", False) is True


def in_own_words(request: Request, message: str, param: str) -> tuple[str, str]:
    """Return an error's message and field with the client's name of the field. The message may begin with
    the name. A request that was turned into a completion has other places, and another name for images, than
    its completion: the places in the message are left out, and the client's name is written.
    """
    (own,) = own_names(request, [param])
    if was_turned(request):
        message = re.sub(rf"^{re.escape(param)}\.[\w.-]+(?=: )", param, message)
        image = _IMAGES.get(request.url.path, "image_url")
        message = message.replace("'image_url'", f"'{image}'")
    if tool := _OF_TOOL.match(message):
        place = _tool_place(getattr(request.state, "sent", None), tool[1])
        return f"{place}{message.removeprefix('tools')}", own
    return re.sub(rf"^{re.escape(param)}\b", own, message), own


def _tool_place(sent: Any, name: str) -> str:
    """Return where a request has the function of a name, in a chat completion's form, Anthropic's or that of
    the Responses API. The function of a namespace has both names.
    """
    for at, tool in _objects(sent, "tools"):
        function = tool.get("function")
        inside = function.get("name") if isinstance(function, dict) else None
        if name in (tool.get("name"), inside):
            return f"tools.{at}"
        for place, inner in _objects(tool, "tools"):
            if joined(str(tool.get("name") or ""), str(inner.get("name"))) == name:
                return f"tools.{at}.tools.{place}"
    return "tools"


def _objects(given: Any, field: str) -> list[tuple[int, Mapping[str, Any]]]:
    """Return the objects in a list of the client's, each with its index; other values may have any form."""
    entries = given.get(field) if isinstance(given, dict) else None
    return [
        (at, each)
        for at, each in enumerate(entries if isinstance(entries, list) else ())
        if isinstance(each, dict)
    ]


def _own(names: Sequence[str], sent: Any) -> str:
    return next((each for each in names if _has(sent, each)), names[0])


def _has(sent: Any, place: str) -> bool:
    for part in place.split("."):
        if not isinstance(sent, dict) or sent.get(part) is None:
            return False
        sent = sent[part]
    return True
