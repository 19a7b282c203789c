"""Continues a plain-text answer at another server: the text so far is sent as the answer's beginning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def continued(body: Mapping[str, Any], text: str, tokens: int = 0) -> dict[str, Any]:
    """Return the call that continues after `text`, which took `tokens` tokens of the call's limit.

    A conversation needs a server that takes `continue_final_message` (vLLM, nearfar); a prompt just becomes
    longer.
    """
    made = dict(body)
    limit = made.pop("max_completion_tokens", None)
    limit = made.get("max_tokens") if limit is None else limit
    if limit is not None:
        made["max_tokens"] = max(limit - tokens, 1)
    if made.get("min_tokens"):
        made["min_tokens"] = max(made["min_tokens"] - tokens, 0)
    if "messages" not in made:
        prompt = made["prompt"]
        return made | {"prompt": f"{prompt[0] if isinstance(prompt, list) else prompt}{text}"}
    messages = list(made["messages"])
    begun = messages.pop() if made.get("continue_final_message") else {"role": "assistant", "content": ""}
    content = begun["content"]
    longer = [*content, {"type": "text", "text": text}] if isinstance(content, list) else f"{content}{text}"
    messages.append({**begun, "content": longer})
    return made | {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
