// @ts-check
/**
 * Answers of a wasm artifact in Node, Deno or Bun, as JSON: `node answers.mjs DIST ARTIFACT`, where DIST is the
 * package's dist folder. The caller compares the texts with the expected ones.
 */
import { pathToFileURL } from "node:url";

const [dist = "", artifact = "", given = "{}"] = process.argv.slice(2);
/** @type {typeof import("../../src/node/index.js")} */
const { createEngine } = await import(pathToFileURL(`${dist}/node/index.js`).href);
const { prompt = "", seed = 1234, count = 60, ...options } = JSON.parse(given);

/** @type {unknown[]} */
const told = [];
const engine = await createEngine(artifact, {
  ...options,
  onProgress: (progress) => progress.phase === "backend" && told.push(progress.backend),
  onWarning: (message) => told.push(message),
});
/** @param {object} request */
const ask = async (request) => await engine.completions.create({ prompt, max_tokens: count, ...request });
const greedy = await ask({ temperature: 0 });
const again = await ask({ temperature: 0 });
const [one, other] = await Promise.all([
  ask({ temperature: 0.9, top_p: 0.95, seed }),
  ask({ temperature: 0.9, top_p: 0.95, seed }),
]);
const scored = await ask({ temperature: 0, max_tokens: 5, logprobs: 2 });
const stats = await engine.stats();
await engine.dispose();
const text = (/** @type {typeof greedy} */ { choices }) => choices[0]?.text;
process.stdout.write(
  `${JSON.stringify({
    greedy: text(greedy),
    again: text(again),
    cached: again.usage.prompt_tokens_details.cached_tokens,
    seeded: [text(one), text(other)],
    logprobs: scored.choices[0]?.logprobs?.token_logprobs,
    backend: stats.backend,
    program: stats.program,
    threads: stats.threads,
    told,
  })}\n`,
);
