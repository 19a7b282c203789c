"""OpenAI's Responses API: a request as the fields of a chat completion.

Items become messages: a model's reasoning and calls become part of the message of their answer. Tools of a
namespace become functions whose name joins both names. `tests/vectors/responses` holds these rules for Python
and TypeScript.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nearfar.edge_runtime.openai.parameters import SAMPLING
from nearfar.errors import RequestError

Record = dict[str, Any]

ITEMS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
"""Types of the items of a request."""
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
"""Types of the parts of an item that are text."""
LOGPROBS = "message.output_text.logprobs"
"""The one value of `include` that changes an answer."""
SHARED = (
    *SAMPLING,
    "stop",
    "stream",
    "parallel_tool_calls",
    "priority",
    "cache_salt",
    "chat_template_kwargs",
)
"""Fields with the same name in a chat completion."""


def chat_of(body: Mapping[str, Any], before: Sequence[Record] = ()) -> Record:
    """Return a checked request as the fields of a chat completion; absent fields are left out.

    `before`: the messages of the earlier responses that the request continues. Raises RequestError for a
    tool_choice that allows a function which is not among the tools.
    """
    told = body.get("instructions")
    messages = [] if told is None else [{"role": "system", "content": told}]
    messages += [*before, *messages_of(body.get("input"))]
    tools, choice = _tools(body)
    top, text = body.get("top_logprobs"), body.get("text") or {}
    logprobs = top is not None or LOGPROBS in (body.get("include") or ())
    return present(
        **{name: body.get(name) for name in SHARED},
        messages=with_one_system(messages),
        max_completion_tokens=body.get("max_output_tokens"),
        tools=tools or None,
        tool_choice=choice,
        response_format=_format(text.get("format")),
        verbosity=text.get("verbosity"),
        reasoning_effort=(body.get("reasoning") or {}).get("effort"),
        logprobs=logprobs or None,
        top_logprobs=top,
    )


def messages_of(given: str | Sequence[Mapping[str, Any]] | None) -> list[Record]:
    """Convert items to messages of a chat."""
    if given is None or isinstance(given, str):
        return [{"role": "user", "content": given}] if given else []
    made: list[Record] = []
    thoughts = ""
    for item in given:
        match item.get("type", "message"):
            case "reasoning":
                thoughts += "".join(part.get("text") or "" for part in _thoughts(item))
                continue
            case "function_call_output":
                content = _content(item["output"])
                made.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
                continue
            case "function_call":
                function = {
                    "name": joined(item.get("namespace"), item["name"]),
                    "arguments": item["arguments"],
                }
                call = {"id": item["call_id"], "type": "function", "function": function}
                if not made or made[-1]["role"] != "assistant" or thoughts:
                    made.append({"role": "assistant", "content": None})
                made[-1].setdefault("tool_calls", []).append(call)
            case _:
                made.append({"role": item["role"], "content": _content(item["content"])})
        if thoughts and made[-1]["role"] == "assistant":
            made[-1]["reasoning_content"] = thoughts
        thoughts = ""
    return made


def functions_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str | None, str]]:
    """Return the namespace and the name of each function, by the joined name that the model sees."""
    found: dict[str, tuple[str | None, str]] = {}
    for tool in tools:
        if tool["type"] == "function":
            found[tool["name"]] = (None, tool["name"])
        else:
            space = tool["name"]
            found |= {joined(space, each["name"]): (space, each["name"]) for each in tool["tools"]}
    return found


def joined(namespace: str | None, name: str) -> str:
    """Return the name under which a model sees a function of a namespace."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def with_one_system(messages: list[Record]) -> list[Record]:
    """Merge the first instructions into one message: chat templates take one system message, at the start."""
    spoken = (at for at, m in enumerate(messages) if m["role"] not in ("system", "developer"))
    count = next(spoken, len(messages))
    if count < 2 or not all(isinstance(message["content"], str) for message in messages[:count]):
        return messages
    text = "\n\n".join(message["content"] for message in messages[:count])
    return [{"role": "system", "content": text}, *messages[count:]]


def present(**fields: Any) -> Record:
    """Return the fields that have a value: clients' nulls stand for what is not given."""
    return {name: value for name, value in fields.items() if value is not None}


def _thoughts(item: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    parts: Sequence[Mapping[str, Any]] = item.get("content") or item.get("summary") or ()
    return parts


def _content(given: str | Sequence[Mapping[str, Any]]) -> str | list[Record]:
    """Convert parts to the content of a chat message: one string where there is text alone."""
    if isinstance(given, str):
        return given
    parts = [_part(part) for part in given]
    if all(part["type"] == "text" and isinstance(part["text"], str) for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: Mapping[str, Any]) -> Record:
    """Return a part in a chat completion's form, whose own checks reject other kinds."""
    kind = part["type"]
    if kind in TEXTS:
        return {"type": "text", "text": part.get("text")}
    if kind == "refusal":
        return {"type": "refusal", "refusal": part.get("refusal")}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    return {"type": kind}


def _format(given: Mapping[str, Any] | None) -> Record | None:
    """Return the format of the answer's text in a chat completion's form."""
    if given is None or given["type"] != "json_schema":
        return None if given is None else dict(given)
    fields = present(**{name: given.get(name) for name in ("schema", "description", "strict")})
    return {"type": "json_schema", "json_schema": {"name": given.get("name") or "answer", **fields}}


def _tools(body: Mapping[str, Any]) -> tuple[list[Record], Any]:
    """Return the tools and the tool choice in a chat completion's form."""
    tools = list[Record]()
    for tool in body.get("tools") or ():
        inner = [tool] if tool["type"] == "function" else tool["tools"]
        space = None if tool["type"] == "function" else tool["name"]
        tools += [_function(each, space) for each in inner]
    choice = body.get("tool_choice")
    if not isinstance(choice, Mapping):  # chats accept "none" and "auto" without tools, and so do responses
        return tools, choice if tools or choice == "required" else None
    if choice["type"] == "function":
        name = joined(choice.get("namespace"), choice["name"])
        return tools, {"type": "function", "function": {"name": name}}
    names = {joined(each.get("namespace"), each["name"]) for each in choice["tools"]}
    if strange := names - {tool["function"]["name"] for tool in tools}:
        raise RequestError(
            f"tool_choice allows {min(strange)!r:.80}, which is not among the tools", "tool_choice"
        )
    return [tool for tool in tools if tool["function"]["name"] in names], choice["mode"]


def _function(tool: Mapping[str, Any], namespace: str | None) -> Record:
    fields = present(**{name: tool.get(name) for name in ("description", "parameters", "strict")})
    return {"type": "function", "function": {"name": joined(namespace, tool["name"]), **fields}}
