"""LiteLLM with its openai and anthropic providers, and its responses."""

import json

import litellm
from asked import HELLO, LONG, MODEL, SCHEMA, URL, Trip, raised, tell, weather

litellm.telemetry = False
texts, parsed, ended, overflow = [], [], [], []
hello = [{"role": "user", "content": HELLO}]
tools = [{"type": "function", "function": {"name": "weather", "description": "x", "parameters": SCHEMA}}]
for provider, base in (("openai", f"{URL}/v1"), ("anthropic", URL)):
    same = {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": "none", "temperature": 0}
    whole = litellm.completion(messages=hello, max_tokens=12, **same).choices[0].message.content
    chunks = litellm.completion(messages=hello, max_tokens=12, stream=True, **same)
    texts.append([whole, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)])
    made = litellm.completion(messages=hello, max_tokens=300, response_format=Trip, **same)
    parsed.append(json.loads(made.choices[0].message.content))
    asked = litellm.completion(
        messages=hello, max_tokens=300, tools=tools, tool_choice="required", parallel_tool_calls=False, **same
    )
    message = asked.choices[0].message
    talk = [*hello, message.model_dump()]
    talk += [
        {
            "role": "tool", "tool_call_id": call.id,
            "content": weather(json.loads(call.function.arguments)["city"]),
        }
        for call in message.tool_calls
    ]  # fmt: skip
    after = litellm.completion(messages=talk, max_tokens=4, tools=tools, **same)
    ended.append(after.choices[0].finish_reason)
    long = [{"role": "user", "content": LONG}]
    overflow.append(raised(lambda given=same, talk=long: litellm.completion(messages=talk, **given)))
response = litellm.responses(
    model=f"openai/{MODEL}", input=HELLO, api_base=f"{URL}/v1", api_key="none", max_output_tokens=12,
    temperature=0,
)  # fmt: skip
ended.append(response.status)
tell(texts=texts, parsed=parsed, ended=ended, overflow=overflow)
