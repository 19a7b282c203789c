"""The anthropic package: messages, streams, a loop of tools, structured output, counting."""

from anthropic import Anthropic
from asked import HELLO, LONG, MODEL, SCHEMA, Trip, raised, tell, weather

client = Anthropic()
hello = [{"role": "user", "content": HELLO}]
tools = [{"name": "weather", "description": "Tells the weather.", "input_schema": SCHEMA}]
same = {"model": MODEL, "max_tokens": 120, "extra_body": {"temperature": 0}}
whole = client.messages.create(messages=hello, **{**same, "max_tokens": 12})
with client.messages.stream(messages=hello, **{**same, "max_tokens": 12}) as stream:
    streamed = "".join(stream.text_stream)
asked = client.messages.create(
    messages=hello, tools=tools, tool_choice={"type": "any", "disable_parallel_tool_use": True}, **same
)
calls = [block for block in asked.content if block.type == "tool_use"]
results = [
    {"type": "tool_result", "tool_use_id": call.id, "content": weather(call.input["city"])} for call in calls
]
talk = [*hello, {"role": "assistant", "content": asked.content}, {"role": "user", "content": results}]
after = client.messages.create(messages=talk, tools=tools, **same)
parsed = client.messages.parse(messages=hello, output_format=Trip, **same)
counted = client.messages.count_tokens(messages=hello, model=MODEL)
tell(
    texts=[whole.content[0].text, streamed],
    parsed=[parsed.parsed_output.model_dump()],
    ended=[asked.stop_reason, after.stop_reason, counted.input_tokens],
    overflow=[raised(lambda: client.messages.create(messages=[{"role": "user", "content": LONG}], **same))],
)
