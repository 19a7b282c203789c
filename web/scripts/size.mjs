// @ts-check
/** Fails when the package, gzipped, is larger than a web app should have to load. */
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";
import { bundle, bundleHere, ENTRIES, madeOf, WORKER } from "./bundle.mjs";

/** Other people's interfaces over an engine, each alone: the engine comes when it is asked for. */
export const ADAPTERS = /** @type {const} */ (["openai", "ai-sdk", "react", "prompt-api"]);

/** What a visitor's first answer fetches: page, worker and a backend, and beside that what deals with text. */
const VISITS = {
  webgpu: [ENTRIES.index, WORKER, "src/worker/parts/gpu.ts"],
  wasm: [ENTRIES.index, WORKER, "src/worker/parts/wasm.ts"],
};
const TEXT = "src/worker/parts/text.ts";

/**
 * Bytes of gzip: an engine that runs through WebGPU, or WebAssembly; tokenizer and chat template, which come
 * on top of either; the routing SDK alone, without an engine; each adapter; what tells of a model before it is
 * loaded; all that an engine may load, but for what follows grammars and what takes answers apart; these,
 * which the first request that asks for a format or has tools loads, or a model that marks its reasoning.
 */
export const LIMITS = {
  webgpu: 60_000,
  wasm: 60_000,
  text: 30_000,
  routing: 25_000,
  openai: 2_500,
  "ai-sdk": 4_000,
  react: 3_000,
  "prompt-api": 6_500,
  models: 14_000,
  all: 141_000,
  grammars: 410_000,
  answers: 12_000,
};

/** Files that a visitor's first answer fetches, text included: each is a trip to the server. */
export const MOST_FILES = 6;

/**
 * Gzipped bytes of what each visitor fetches, of what each other entry imports statically, and of everything;
 * `files`: the most that a visit fetches.
 */
export async function measure() {
  const { metafile, outputFiles } = await bundle();
  const { outputs } = metafile;
  // Without what debuggers load.
  const paths = Object.keys(outputs).filter((path) => !path.endsWith(".map"));
  const grammars = madeOf(outputs, /web-xgrammar|src\/grammar\/(index|schema)\.ts/);
  const answers = madeOf(outputs, /src\/worker\/answers\/(index|spelled)\.ts/);
  const later = [...grammars, ...answers];
  /** @param {Iterable<string>} some */
  const size = (some) => {
    let sum = 0;
    for (const path of some) {
      const file = outputFiles.find((output) => output.path.endsWith(`/${path}`));
      if (!file) throw new Error(`esbuild lists ${path}, but has not made it`);
      sum += zipped(file.contents);
    }
    return sum;
  };
  /** @param {readonly string[]} entries */
  const closure = (entries) => {
    /** @type {Set<string>} */
    const seen = new Set();
    /** @param {string} path */
    const visit = (path) => {
      if (seen.has(path)) return;
      seen.add(path);
      for (const imported of outputs[path]?.imports ?? [])
        if (imported.kind === "import-statement" && !imported.external) visit(imported.path);
    };
    for (const entry of entries) {
      const path = paths.find((path) => outputs[path]?.entryPoint === entry);
      if (!path) throw new Error(`the bundle has nothing that begins with ${entry}`);
      visit(path);
    }
    return seen;
  };
  const { webgpu, wasm } = VISITS;
  const visits = [webgpu, wasm].map((entries) => closure([...entries, TEXT]));
  const adapters = ADAPTERS.map((name) => ENTRIES[name]).map(String);
  return {
    webgpu: size(closure(webgpu)),
    wasm: size(closure(wasm)),
    text: size(closure([...webgpu, TEXT])) - size(closure(webgpu)),
    files: Math.max(...visits.map(({ size }) => size)),
    routing: size(closure([ENTRIES["routing/index"]])),
    .../** @type {Record<typeof ADAPTERS[number], number>} */ (
      Object.fromEntries(ADAPTERS.map((name) => [name, size(closure([ENTRIES[name]]))]))
    ),
    models: await sizeOfModels(),
    all: size(
      paths.filter((path) => !later.includes(path) && !adapters.includes(outputs[path]?.entryPoint ?? "")),
    ),
    grammars: size(grammars),
    answers: size(answers),
  };
}

/** What tells of a model before it is loaded. */
async function sizeOfModels() {
  const { outputFiles } = await bundleHere();
  const file = outputFiles.find(({ path }) => path.endsWith("/models.js"));
  return zipped(file?.contents ?? new Uint8Array());
}

/**
 * Bytes of a script, gzipped, without its last line, which tells debuggers where its map is.
 * @param {Uint8Array} contents
 */
function zipped(contents) {
  const script = Buffer.from(contents)
    .toString()
    .replace(/\n\/\/# sourceMappingURL=\S+\s*$/, "");
  return gzipSync(script, { level: 9 }).length;
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const { files, ...sizes } = await measure();
  for (const [name, limit] of Object.entries(LIMITS)) {
    const bytes = sizes[/** @type {keyof typeof LIMITS} */ (name)];
    const fits = bytes <= limit;
    process.stdout.write(`${name}: ${bytes} bytes gzipped, at most ${limit}${fits ? "" : ": TOO LARGE"}\n`);
    if (!fits) process.exitCode = 1;
  }
  process.stdout.write(`files of a visit: ${files}, at most ${MOST_FILES}\n`);
  if (files > MOST_FILES) process.exitCode = 1;
}
