// @ts-check
/**
 * Answers with a response_format in Node, as JSON: `node objects.mjs DIST ARTIFACT FORMAT COUNT`. Each has
 * another seed, at temperature 1.5; half of them are streamed, and answers of free text run beside them.
 */
import { pathToFileURL } from "node:url";

const [dist = "", artifact = "", format = "", count = "1"] = process.argv.slice(2);
/** @type {typeof import("../../src/node/index.js")} */
const { createEngine } = await import(pathToFileURL(`${dist}/node/index.js`).href);
const engine = await createEngine(artifact);
const response_format = JSON.parse(format);
/** @type {import("../../src/protocol/openai.js").MessageParam[]} */
const messages = [{ role: "user", content: "Who lives in the forest?" }];

/** @param {number} seed */
async function ask(seed) {
  const request = { messages, response_format, temperature: 1.5, max_tokens: 900, seed };
  if (seed % 2 === 0) {
    const { choices } = await engine.chat.completions.create({ ...request, logprobs: true, top_logprobs: 2 });
    const [choice] = choices;
    return [choice?.finish_reason, choice?.message.content, choice?.logprobs?.content.length];
  }
  let text = "";
  let reason = null;
  for await (const { choices } of await engine.chat.completions.create({ ...request, stream: true })) {
    text += choices[0]?.delta.content ?? "";
    reason = choices[0]?.finish_reason ?? reason;
  }
  return [reason, text, null];
}

/** @param {number} seed */
async function free(seed) {
  const { choices } = await engine.chat.completions.create({
    messages,
    temperature: 0.9,
    max_tokens: 20,
    seed,
  });
  return choices[0]?.message.content;
}

const alone = await free(1);
const answers = [];
for (let seed = 0; seed < Number(count); seed += 2)
  answers.push(...(await Promise.all([ask(seed), ask(seed + 1)])));
const [beside] = await Promise.all([free(1), ask(0)]);
const again = await ask(0);
await engine.dispose();
process.stdout.write(`${JSON.stringify({ answers, again, free: [alone, beside] })}\n`);
