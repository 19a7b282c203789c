// Anthropic's package: messages whole and streamed, a loop of tools, a schema.
import Anthropic from "@anthropic-ai/sdk";
import { HELLO, LONG, model, TRIP, tell, thrown, url, WEATHER, weather } from "./asked.mjs";

const client = new Anthropic({ baseURL: url, maxRetries: 0 });
const same = { model, temperature: 0, max_tokens: 300 };
const short = { ...same, max_tokens: 12 };
const whole = await client.messages.create({ messages: HELLO, ...short });
let streamed = "";
for await (const event of client.messages.stream({ messages: HELLO, ...short }))
  if (event.type === "content_block_delta" && event.delta.type === "text_delta") streamed += event.delta.text;
const tools = [{ name: "weather", description: "Tells the weather.", input_schema: WEATHER }];
const one = { type: "any", disable_parallel_tool_use: true };
const asked = await client.messages.create({ messages: HELLO, tools, tool_choice: one, ...same });
const content = asked.content
  .filter((block) => block.type === "tool_use")
  .map((call) => ({ type: "tool_result", tool_use_id: call.id, content: weather(call.input) }));
const talk = [...HELLO, { role: "assistant", content: asked.content }, { role: "user", content }];
const after = await client.messages.create({ messages: talk, tools, ...short });
const output_config = { format: { type: "json_schema", schema: TRIP } };
const typed = await client.messages.create({ messages: HELLO, output_config, ...same });
tell({
  texts: [whole.content[0].text, streamed],
  parsed: [JSON.parse(typed.content[0].text)],
  ended: [asked.stop_reason, after.stop_reason],
  overflow: [await thrown(() => client.messages.create({ messages: [{ role: "user", content: LONG }], ...same }))],
});
