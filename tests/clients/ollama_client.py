"""The ollama package: chat and generate, streams, a schema, a loop of tools."""

from asked import HELLO, LONG, MODEL, URL, Trip, raised, tell, weather
from ollama import Client

client = Client(host=URL)
hello = [{"role": "user", "content": HELLO}]
short, long = {"temperature": 0, "num_predict": 12}, {"temperature": 0, "num_predict": 120}
whole = client.chat(MODEL, hello, options=short).message
streamed = "".join(part.message.content for part in client.chat(MODEL, hello, options=short, stream=True))
generated = client.generate(MODEL, HELLO, options=short).response
made = client.chat(MODEL, hello, format=Trip.model_json_schema(), options=long)
talk = [
    *hello,
    {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}]},
    {"role": "tool", "tool_name": "weather", "content": weather("Oslo")},
]
after = client.chat(MODEL, talk, tools=[weather], options=short)
tell(
    texts=[whole.content, streamed, generated],
    parsed=[Trip.model_validate_json(made.message.content).model_dump()],
    ended=[after.done_reason, client.list().models[0].model, bool(client.show(MODEL).capabilities)],
    overflow=[raised(lambda: client.chat(MODEL, [{"role": "user", "content": LONG}]))],
)
