// @ts-check
/**
 * Answers that must call one of the tools, in Node, as JSON: `node tools.mjs DIST ARTIFACT TOOLS COUNT`. Each
 * has another seed, at temperature 1.5; half of them are streamed.
 */
import { pathToFileURL } from "node:url";

const [dist = "", artifact = "", listed = "", count = "1"] = process.argv.slice(2);
/** @type {typeof import("../../src/node/index.js")} */
const { createEngine } = await import(pathToFileURL(`${dist}/node/index.js`).href);
const engine = await createEngine(artifact);
/** @type {import("../../src/protocol/openai.js").FunctionTool[]} */
const tools = JSON.parse(listed);
/** @type {import("../../src/protocol/openai.js").MessageParam[]} */
const messages = [{ role: "user", content: "Who lives in the forest?" }];

/** @param {number} seed */
async function ask(seed) {
  const drawn = { messages, tools, temperature: 1.5, max_tokens: 900, seed };
  const request = /** @type {const} */ ({ ...drawn, tool_choice: "required", parallel_tool_calls: false });
  if (seed % 2 === 0) {
    const [choice] = (await engine.chat.completions.create(request)).choices;
    return [choice?.finish_reason, choice?.message.content, choice?.message.tool_calls];
  }
  let text = "";
  /** @type {any[]} */
  const calls = [];
  let reason = null;
  for await (const { choices } of await engine.chat.completions.create({ ...request, stream: true })) {
    text += choices[0]?.delta.content ?? "";
    for (const { index, ...call } of choices[0]?.delta.tool_calls ?? []) {
      if (call.id) calls[index] = call;
      else calls[index].function.arguments += call.function?.arguments ?? "";
    }
    reason = choices[0]?.finish_reason ?? reason;
  }
  return [reason, text || null, calls];
}

const answers = [];
for (let seed = 0; seed < Number(count); seed++) answers.push(await ask(seed));
const { features } = engine.model;
await engine.dispose();
process.stdout.write(`${JSON.stringify({ answers, features })}\n`);
