// The ollama package: chat whole and streamed, a schema, a loop of tools.
import { Ollama } from "ollama";
import { HELLO, LONG, model, TRIP, tell, thrown, url, WEATHER, weather } from "./asked.mjs";

const client = new Ollama({ host: url });
const same = { model, messages: HELLO, options: { temperature: 0, num_predict: 12 } };
const whole = await client.chat(same);
let streamed = "";
for await (const part of await client.chat({ ...same, stream: true })) streamed += part.message.content;
const typed = await client.chat({ ...same, format: TRIP, options: { temperature: 0, num_predict: 300 } });
const calls = [{ function: { name: "weather", arguments: { city: "Oslo" } } }];
const messages = [
  ...HELLO,
  { role: "assistant", content: "", tool_calls: calls },
  { role: "tool", tool_name: "weather", content: weather({ city: "Oslo" }) },
];
const tools = [{ type: "function", function: { name: "weather", description: "x", parameters: WEATHER } }];
const after = await client.chat({ ...same, messages, tools });
tell({
  texts: [whole.message.content, streamed],
  parsed: [JSON.parse(typed.message.content)],
  ended: [after.done_reason, (await client.list()).models[0].model],
  overflow: [await thrown(() => client.chat({ ...same, messages: [{ role: "user", content: LONG }] }))],
});
