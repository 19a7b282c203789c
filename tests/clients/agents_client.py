"""openai-agents at its defaults (the Responses API): a run, a stream, a tool, a typed output."""

import asyncio

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled
from asked import HELLO, LONG, MODEL, Trip, tell, told, weather

set_tracing_disabled(True)
BRIEF = {"stop": list("bdfjkpqvxz\x19")}
"""Request options that end a text early, but no call: this package treats a text that max_tokens has cut as
an error.
"""
short = ModelSettings(temperature=0, extra_body=BRIEF)
must = ModelSettings(temperature=0, extra_body=BRIEF, tool_choice="required", parallel_tool_calls=False)
plain = Agent(name="plain", model=MODEL, instructions="Be short.", model_settings=short)
tooled = Agent(name="tooled", model=MODEL, tools=[function_tool(weather)], model_settings=must)
typed = Agent(name="typed", model=MODEL, output_type=Trip, model_settings=ModelSettings(temperature=0))


async def main() -> None:
    whole = (await Runner.run(plain, HELLO)).final_output
    run, streamed = Runner.run_streamed(plain, HELLO), ""
    async for event in run.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            streamed += event.data.delta
    after = await Runner.run(tooled, HELLO)
    trip = (await Runner.run(typed, HELLO)).final_output
    try:
        await Runner.run(plain, LONG)
        overflow = "nothing"
    except Exception as error:
        overflow = told(error)
    tell(
        texts=[whole, streamed],
        parsed=[trip.model_dump()],
        ended=[type(after.final_output).__name__],
        overflow=[overflow],
    )


asyncio.run(main())
