"""instructor: typed answers of chat completions, by tools and by JSON, whole and as they grow."""

import instructor
from asked import HELLO, LONG, MODEL, Trip, raised, tell
from openai import OpenAI

hello = [{"role": "user", "content": HELLO}]
parsed = []
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(max_retries=0), mode=mode)
    same = {"model": MODEL, "messages": hello, "response_model": Trip, "max_tokens": 120, "temperature": 0}
    parsed.append(client.chat.completions.create(**same).model_dump())
    *_, last = client.chat.completions.create_partial(**same)
    parsed.append(last.model_dump())
long = {**same, "messages": [{"role": "user", "content": LONG}], "max_retries": 0}
tell(texts=[], parsed=parsed, ended=[], overflow=[raised(lambda: client.chat.completions.create(**long))])
