"""The openai package: chat completions with its own parse loop, and responses."""

from asked import HELLO, LONG, MODEL, City, Trip, raised, tell, weather
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel


class Weather(BaseModel):
    """Tells the weather of a city."""

    city: City


client = OpenAI()
hello = [{"role": "user", "content": HELLO}]
same = {"model": MODEL, "temperature": 0}
whole = client.chat.completions.create(messages=hello, max_tokens=12, **same).choices[0].message.content
chunks = client.chat.completions.create(messages=hello, max_tokens=12, stream=True, **same)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

talk = list(hello)
asked = client.chat.completions.parse(
    messages=talk, tools=[pydantic_function_tool(Weather)], tool_choice="required", parallel_tool_calls=False,
    **same,
).choices[0].message  # fmt: skip
(call,) = asked.tool_calls
result = weather(call.function.parsed_arguments.city)
talk += [asked, {"role": "tool", "tool_call_id": call.id, "content": result}]
after = client.chat.completions.parse(messages=talk, response_format=Trip, max_tokens=300, **same).choices[0]
talk += [after.message, {"role": "user", "content": "Again."}]
again = client.chat.completions.create(messages=talk, max_tokens=4, **same)

response = client.responses.create(input=HELLO, max_output_tokens=12, **same)
with client.responses.stream(input=HELLO, max_output_tokens=12, **same) as events:
    responded = "".join(event.delta for event in events if event.type == "response.output_text.delta")
parsed = client.responses.parse(input=HELLO, text_format=Trip, max_output_tokens=300, **same)
followed = client.responses.create(
    input="Again.", previous_response_id=response.id, max_output_tokens=4, **same
)
tell(
    texts=[whole, streamed, response.output_text, responded],
    parsed=[after.message.parsed.model_dump(), parsed.output_parsed.model_dump()],
    ended=[again.choices[0].finish_reason, followed.status],
    overflow=[
        raised(lambda: client.chat.completions.create(messages=[{"role": "user", "content": LONG}], **same)),
        raised(lambda: client.responses.create(input=LONG, **same)),
    ],
)
