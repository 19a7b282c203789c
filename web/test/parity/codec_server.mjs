/**
 * Answers questions about tokenizers and chat templates (tests/support/codec_server.py): a JSON job a line on
 * stdin, a JSON answer a line on stdout.
 * Job: {files: {tokenizerJson, tokenizerConfig, chatTemplate?}, special, encode: [{text, addSpecialTokens}],
 *       decode: [[ids…]], chat: [{messages, addGenerationPrompt?, continueLast?}],
 *       streams: [{ids, stop, context?}]}; or
 *      {render: [{template, messages, tools?, variables?, tokens?, addGenerationPrompt?, now?}]}, messages as
 *       OpenAI's interface has them, now in milliseconds; or
 *      {vocabulary: true}: the names that templates may use.
 */
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { createInterface } from "node:readline";
import { fileURLToPath, pathToFileURL } from "node:url";
import { build } from "esbuild";

const web = join(dirname(fileURLToPath(import.meta.url)), "..", "..");

const SOURCE = `
export * from "./text/index.js";
export { ChatTemplate } from "./text/template.js";
export { vocabulary } from "./text/jinja/index.js";
export { prompting } from "./answers/prompting.js";
`;

async function loadCodec() {
  const folder = await mkdtemp(join(tmpdir(), "nearfar-parity-"));
  try {
    const outfile = join(folder, "text.mjs");
    await build({
      stdin: { contents: SOURCE, resolveDir: join(web, "src/worker"), loader: "ts" },
      outfile,
      bundle: true,
      format: "esm",
      platform: "node",
      logLevel: "error",
    });
    return await import(pathToFileURL(outfile).href);
  } finally {
    await rm(folder, { recursive: true });
  }
}

function decode(codec, ids, stop = [], context = []) {
  const stream = codec.stream(stop, context);
  const pieces = [];
  let stopped = false;
  for (const id of ids) {
    const delta = stream.push(id);
    pieces.push(delta.text);
    stopped = delta.stopped;
    if (stopped) break;
  }
  pieces.push(stream.flush());
  return { pieces, stopped };
}

/** Templates are compiled once for all cases. */
const templates = new Map();

function rendered({ template, messages, tools = [], variables, tokens = {}, addGenerationPrompt, now }) {
  const key = JSON.stringify([template, tokens]);
  if (!templates.has(key)) templates.set(key, new ChatTemplate(template, tokens));
  const told = prompting(messages, tools, null, template);
  const options = { tools: told.tools, variables, addGenerationPrompt };
  const render = () => templates.get(key).render(told.messages, options);
  return now === undefined ? render() : at(now, render);
}

/** Runs an action with the clock set to this time. */
function at(now, action) {
  const RealDate = Date;
  globalThis.Date = class extends RealDate {
    constructor(...given) {
      super(...(given.length > 0 ? given : [now]));
    }
  };
  try {
    return action();
  } finally {
    globalThis.Date = RealDate;
  }
}

const { createTextCodec, ChatTemplate, prompting, vocabulary } = await loadCodec();
const attempt = (action) => {
  try {
    return action();
  } catch (error) {
    return { error: String(error) };
  }
};
for await (const line of createInterface({ input: process.stdin })) {
  const job = JSON.parse(line);
  if (job.render || job.vocabulary) {
    const answer = job.vocabulary ? vocabulary() : job.render.map((one) => attempt(() => rendered(one)));
    process.stdout.write(`${JSON.stringify(answer)}\n`);
    continue;
  }
  const codec = createTextCodec(job.files, job.special);
  const answer = {
    encode: job.encode.map(({ text, addSpecialTokens }) => codec.encode(text, { addSpecialTokens })),
    decode: job.decode.map((ids) => decode(codec, ids).pieces),
    chat: job.chat.map(({ messages, ...options }) =>
      attempt(() => codec.encode(codec.render(messages, options), { addSpecialTokens: false })),
    ),
    streams: job.streams.map(({ ids, stop, context }) => decode(codec, ids, stop, context)),
  };
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
