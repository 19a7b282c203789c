"""langchain-openai and langchain-anthropic: invoke, stream, tools, structured output, overflow."""

from asked import HELLO, LONG, MODEL, URL, Trip, raised, tell, weather
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

texts, parsed, ended, overflow = [], [], [], []
ask = tool(weather)
for make in (
    lambda most: ChatOpenAI(model=MODEL, temperature=0, max_tokens=most, max_retries=0),
    lambda most: ChatOpenAI(
        model=MODEL, temperature=0, max_tokens=most, max_retries=0, use_responses_api=True
    ),
    lambda most: ChatAnthropic(model=MODEL, temperature=0, max_tokens=most, base_url=URL, max_retries=0),
):
    short, model = make(12), make(120)
    texts.append([short.invoke(HELLO).text, "".join(chunk.text for chunk in short.stream(HELLO))])
    parsed.append(model.with_structured_output(Trip).invoke(HELLO).model_dump())
    bound = model.bind_tools([ask], tool_choice="any", parallel_tool_calls=False)
    talk = [HumanMessage(HELLO), bound.invoke(HELLO)]
    talk += [ToolMessage(ask.invoke(call["args"]), tool_call_id=call["id"]) for call in talk[-1].tool_calls]
    ended.append(type(short.bind_tools([ask]).invoke(talk)).__name__)
    overflow.append(raised(lambda model=short: model.invoke(LONG)))
tell(texts=texts, parsed=parsed, ended=ended, overflow=overflow)
