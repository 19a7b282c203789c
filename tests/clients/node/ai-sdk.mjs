// The AI SDK with three providers: OpenAI's (the Responses API), openai-compatible, and Anthropic's.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, streamText, tool } from "ai";
import { called, LONG, model, TRIP, tell, thrown, url, WEATHER, weather } from "./asked.mjs";

const baseURL = `${url}/v1`;
const providers = [
  createOpenAI({ baseURL }),
  createOpenAICompatible({ name: "nearfar", baseURL, supportsStructuredOutputs: true }),
  createAnthropic({ baseURL }),
];
const tools = {
  weather: tool({ description: "Tells the weather.", inputSchema: jsonSchema(WEATHER), execute: weather }),
};
const found = { texts: [], parsed: [], ended: [], overflow: [] };
for (const provider of providers) {
  const same = { model: provider(model), prompt: "Hello", temperature: 0, maxRetries: 0 };
  const whole = await generateText({ ...same, maxOutputTokens: 12 });
  let streamed = "";
  for await (const part of streamText({ ...same, maxOutputTokens: 12 }).textStream) streamed += part;
  found.texts.push([whole.text, streamed]);
  const output = Output.object({ schema: jsonSchema(TRIP) });
  found.parsed.push((await generateText({ ...same, output, maxOutputTokens: 300 })).output);
  const before = called.length;
  const asked = await generateText({ ...same, tools, toolChoice: { type: "tool", toolName: "weather" }, maxOutputTokens: 300 });
  if (called.length === before) throw new Error("no tool was called");
  const messages = [{ role: "user", content: "Hello" }, ...asked.response.messages];
  const after = await generateText({ ...same, prompt: undefined, messages, tools, maxOutputTokens: 12 });
  found.ended.push(after.finishReason);
  found.overflow.push(await thrown(() => generateText({ ...same, prompt: LONG })));
}
tell(found);
