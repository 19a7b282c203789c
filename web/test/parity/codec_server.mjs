/**
 * Answers tokenizer questions for tests/unit/test_tokenizer_parity.py: one JSON job on stdin, one JSON answer
 * on stdout.
 * Job: {files: {tokenizerJson, tokenizerConfig, chatTemplate?}, special, encode: [{text, addSpecialTokens}],
 *       decode: [[ids…]], chat: [{messages, addGenerationPrompt?, continueLast?}],
 *       streams: [{ids, stop, context?}]}.
 */
import { readFileSync } from "node:fs";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
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

const job = JSON.parse(readFileSync(0, "utf8"));
const { createTextCodec } = await loadCodec();
const codec = createTextCodec(job.files, job.special);
const attempt = (action) => {
  try {
    return action();
  } catch (error) {
    return { error: String(error) };
  }
};
process.stdout.write(
  JSON.stringify({
    encode: job.encode.map(({ text, addSpecialTokens }) => codec.encode(text, { addSpecialTokens })),
    decode: job.decode.map((ids) => decode(codec, ids).pieces),
    chat: job.chat.map(({ messages, ...options }) => attempt(() => codec.chat(messages, options))),
    streams: job.streams.map(({ ids, stop, context }) => decode(codec, ids, stop, context)),
  }),
);
