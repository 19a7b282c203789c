/** Further requests of an app: a format, a tool, an object of the AI SDK, and an answer that it abandons. */

import { createEngine } from "nearfar";
import { nearfar } from "nearfar/ai-sdk";
// The package `ai` in one file, because not every bundler takes its imports without plugins.
import { generateText, jsonSchema, Output } from "./ai.js";

const SCHEMA = {
  type: "object",
  properties: { kind: { enum: ["cat", "dog"] }, legs: { type: "integer", minimum: 0, maximum: 8 } },
  required: ["kind", "legs"],
  additionalProperties: false,
};
const WEATHER = {
  type: "function",
  function: {
    name: "weather",
    parameters: { type: "object", properties: { city: { enum: ["Oslo", "Rome"] } }, required: ["city"] },
  },
};
// The model answers with the text between ^ and ~, as far as a grammar allows it.
const messages = [{ role: "user", content: "A pet? ^No.~" }];
const asked = { messages, max_tokens: 120, temperature: 0 };

/** Puts the answers of the model at `url` into the page as #asked, or the error as #failed. */
export async function ask(url, options) {
  const engine = await createEngine(url, options);
  const { completions } = engine.chat;
  const json_schema = { name: "pet", schema: SCHEMA };
  const whole = await completions.create({
    ...asked,
    response_format: { type: "json_schema", json_schema },
  });
  const called = await completions.create({
    ...{ ...asked, messages: [{ role: "user", content: "Weather? ^<tool_call>No.~" }] },
    tools: [WEATHER],
    tool_choice: "required",
    parallel_tool_calls: false,
  });
  const { output } = await generateText({
    model: nearfar(engine),
    prompt: messages[0].content,
    maxOutputTokens: 120,
    temperature: 0,
    output: Output.object({ schema: jsonSchema(SCHEMA) }),
  });
  const left = await leave(completions);
  // After an abandoned answer the engine takes the next request.
  const after = await completions.create({ ...asked, messages: [{ role: "user", content: "^Yes.~" }] });
  await engine.dispose();
  const [{ message, finish_reason }] = called.choices;
  return {
    format: JSON.parse(whole.choices[0].message.content),
    call: { reason: finish_reason, ...message.tool_calls[0].function },
    object: output,
    left,
    after: after.choices[0].message.content,
  };
}

async function leave(completions) {
  const leaving = new AbortController();
  const content = `^${"la ".repeat(30)}~`;
  const { signal } = leaving;
  try {
    const stream = await completions.create({
      ...{ ...asked, messages: [{ role: "user", content }] },
      stream: true,
      signal,
    });
    for await (const _ of stream) leaving.abort(new Error("left"));
  } catch (error) {
    return error.message;
  }
  return "answered to the end";
}

export function show(asking) {
  const put = (id, text) => {
    document.body.append(Object.assign(document.createElement("pre"), { id, textContent: text }));
  };
  asking.then(
    (told) => put("asked", JSON.stringify(told)),
    (error) => put("failed", `${error.code}: ${error.message}`),
  );
}
