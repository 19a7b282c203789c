// The official openai package against a running server: node openai-client.mjs URL MODEL. Writes what it
// found as JSON.
import process from "node:process";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const asked = {
  model,
  messages: [{ role: "user", content: "Tell me about the fox." }],
  max_tokens: 24,
  temperature: 0,
};
const tool = {
  type: "function",
  function: {
    name: "weather",
    parameters: {
      type: "object",
      properties: { city: { enum: ["Oslo", "Rome"] } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};

async function streamed() {
  const parts = [];
  let usage;
  for await (const chunk of await client.chat.completions.create({
    ...asked,
    stream: true,
    stream_options: { include_usage: true },
  })) {
    parts.push(chunk.choices[0]?.delta.content ?? "");
    usage = chunk.usage ?? usage;
  }
  return { text: parts.join(""), pieces: parts.filter((part) => part).length, usage };
}

async function calls() {
  const wanted = {
    ...asked,
    tools: [tool],
    tool_choice: "required",
    parallel_tool_calls: false,
    max_tokens: 100,
  };
  const whole = await client.chat.completions.create(wanted);
  const runner = client.chat.completions.stream(wanted);
  const final = await runner.finalChatCompletion();
  return [whole, final].map((made) => ({
    finish: made.choices[0].finish_reason,
    ...made.choices[0].message.tool_calls[0],
  }));
}

async function aborted() {
  const stream = await client.completions.create({
    model,
    prompt: "Once",
    max_tokens: 900,
    ignore_eos: true,
    stream: true,
  });
  let pieces = 0;
  for await (const _ of stream) {
    pieces += 1;
    if (pieces === 3) stream.controller.abort();
  }
  return pieces;
}

async function refused() {
  const found = [];
  for (const wrong of [{ temperature: -1 }, { model: "another" }]) {
    try {
      await client.chat.completions.create({ ...asked, ...wrong });
      found.push({ kind: "none" });
    } catch (error) {
      found.push({ kind: error.constructor.name, status: error.status, param: error.param });
    }
  }
  return found;
}

const whole = await client.chat.completions.create(asked);
const models = [];
for await (const entry of client.models.list()) models.push(entry.id);
const result = {
  models,
  whole: { text: whole.choices[0].message.content, usage: whole.usage },
  streamed: await streamed(),
  calls: await calls(),
  aborted: await aborted(),
  refused: await refused(),
};
process.stdout.write(JSON.stringify(result));
