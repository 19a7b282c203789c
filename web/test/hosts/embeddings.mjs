// @ts-check
/**
 * Embeddings in Node, as JSON: `node embeddings.mjs DIST ARTIFACT TEXTS`, from the engine itself, and through
 * the `ai` package and the `openai` package.
 */
import { pathToFileURL } from "node:url";
import { embed, embedMany } from "ai";
import OpenAI from "openai";

const [dist = "", artifact = "", given = ""] = process.argv.slice(2);
/** @param {string} file */
const load = (file) => import(pathToFileURL(`${dist}/${file}`).href);
/** @type {typeof import("../../src/node/index.js")} */
const { createEngine } = await load("node/index.js");
/** @type {typeof import("../../src/ai-sdk/index.js")} */
const { embeddingModel } = await load("ai-sdk.js");
/** @type {typeof import("../../src/openai-fetch/index.js")} */
const { engineFetch } = await load("openai.js");

/** @type {string[]} */
const texts = JSON.parse(given);
const engine = await createEngine(artifact);
const model = embeddingModel(engine);
const client = new OpenAI({ baseURL: "http://nearfar.local/v1", apiKey: "-", fetch: engineFetch(engine) });
/** @param {Promise<unknown>} promise */
const failure = (promise) =>
  promise.then(
    () => null,
    (error) => String(error.message),
  );

const whole = await engine.embeddings.create({ input: texts });
const short = await engine.embeddings.create({ input: texts, dimensions: 8 });
const many = await embedMany({ model, values: texts });
const one = await embed({ model, value: texts[0] ?? "" });
// The client asks for base64, and decodes it.
const { name } = engine.model;
const official = await client.embeddings.create({ model: name, input: texts });
const told = {
  whole,
  short: short.data.map(({ embedding }) => embedding),
  many: many.embeddings,
  tokens: many.usage.tokens,
  one: one.embedding,
  official: official.data.map(({ embedding }) => embedding),
  refused: [
    await failure(engine.embeddings.create({ input: "a".repeat(160) })),
    await failure(engine.embeddings.create({ input: "a", dimensions: 49 })),
    // @ts-expect-error: it is refused
    await failure(engine.embeddings.create({ input: "a", pooling: "mean" })),
    await failure(engine.completions.create({ prompt: "a" })),
  ],
};
await engine.dispose();
process.stdout.write(JSON.stringify(told));
