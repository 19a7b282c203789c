// The openai package: chat completions whole and streamed, a loop of tools, a schema, responses.
import OpenAI from "openai";
import { HELLO, LONG, model, TRIP, tell, thrown, url, WEATHER, weather } from "./asked.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, maxRetries: 0 });
const same = { model, temperature: 0 };
const short = { ...same, max_tokens: 12 };
const whole = (await client.chat.completions.create({ messages: HELLO, ...short })).choices[0].message.content;
let streamed = "";
for await (const chunk of await client.chat.completions.create({ messages: HELLO, stream: true, ...short }))
  streamed += chunk.choices[0]?.delta.content ?? "";
const tools = [{ type: "function", function: { name: "weather", parameters: WEATHER, strict: true } }];
const asked = await client.chat.completions.create({
  messages: HELLO, tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 300, ...same,
});
const { message } = asked.choices[0];
const [call] = message.tool_calls;
const result = weather(JSON.parse(call.function.arguments));
const talk = [...HELLO, message, { role: "tool", tool_call_id: call.id, content: result }];
const after = await client.chat.completions.create({ messages: talk, tools, ...short });
const text = { format: { type: "json_schema", name: "trip", schema: TRIP, strict: true } };
const typed = await client.responses.create({ input: "Hello", text, max_output_tokens: 300, ...same });
const response = await client.responses.create({ input: "Hello", max_output_tokens: 12, ...same });
let said = "";
for await (const event of client.responses.stream({ input: "Hello", max_output_tokens: 12, ...same }))
  if (event.type === "response.output_text.delta") said += event.delta;
tell({
  texts: [whole, streamed, response.output_text, said],
  parsed: [JSON.parse(typed.output_text)],
  ended: [after.choices[0].finish_reason, response.status],
  overflow: [
    await thrown(() => client.chat.completions.create({ messages: [{ role: "user", content: LONG }], ...same })),
    await thrown(() => client.responses.create({ input: LONG, ...same })),
  ],
});
