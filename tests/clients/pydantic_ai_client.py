"""pydantic-ai with three of its providers: OpenAI's Responses API, its chat completions, Anthropic."""

import asyncio

from asked import HELLO, LONG, MODEL, Trip, raised, tell, weather
from pydantic_ai import Agent

texts, parsed, ended, overflow = [], [], [], []
for provider in ("openai-responses", "openai-chat", "anthropic"):
    model = f"{provider}:{MODEL}"
    plain = Agent(model, model_settings={"temperature": 0, "max_tokens": 12})

    async def streamed(agent: Agent = plain) -> str:
        async with agent.run_stream(HELLO) as run:
            return "".join([part async for part in run.stream_text(delta=True, debounce_by=None)])

    texts.append([plain.run_sync(HELLO).output, asyncio.run(streamed())])
    typed = Agent(model, output_type=Trip, model_settings={"temperature": 0, "max_tokens": 200})
    made = typed.run_sync(HELLO)
    parsed.append(made.output.model_dump())
    tooled = Agent(model, tools=[weather], model_settings={"temperature": 0, "max_tokens": 40})
    talk = tooled.run_sync(HELLO, message_history=made.all_messages())  # with the calls of the previous run
    ended.append(type(talk.output).__name__)
    overflow.append(raised(lambda agent=plain: agent.run_sync(LONG)))
tell(texts=texts, parsed=parsed, ended=ended, overflow=overflow)
