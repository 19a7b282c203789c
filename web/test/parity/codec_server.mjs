/**
 * Answers tokenizer questions for tests/unit/test_tokenizer_parity.py: a JSON job a line on stdin, a JSON answer
 * a line on stdout.
 * Job: {files: {tokenizerJson, tokenizerConfig, chatTemplate?}, special, encode: [{text, addSpecialTokens}],
 *       decode: [[ids…]], chat: [{messages, addGenerationPrompt?, continueLast?}],
 *       streams: [{ids, stop, context?}]}.
 */
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { createInterface } from "node:readline";
import { fileURLToPath, pathToFileURL } from "node:url";
import { build } from "esbuild";

const web = join(dirname(fileURLToPath(import.meta.url)), "..", "..");

async function loadCodec() {
  const folder = await mkdtemp(join(tmpdir(), "nearfar-parity-"));
  try {
    const outfile = join(folder, "text.mjs");
    await build({
      entryPoints: [join(web, "src/worker/text/index.ts")],
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

const { createTextCodec } = await loadCodec();
const attempt = (action) => {
  try {
    return action();
  } catch (error) {
    return { error: String(error) };
  }
};
for await (const line of createInterface({ input: process.stdin })) {
  const job = JSON.parse(line);
  const codec = createTextCodec(job.files, job.special);
  const answer = {
    encode: job.encode.map(({ text, addSpecialTokens }) => codec.encode(text, { addSpecialTokens })),
    decode: job.decode.map((ids) => decode(codec, ids).pieces),
    chat: job.chat.map(({ messages, ...options }) => attempt(() => codec.chat(messages, options))),
    streams: job.streams.map(({ ids, stop, context }) => decode(codec, ids, stop, context)),
  };
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
