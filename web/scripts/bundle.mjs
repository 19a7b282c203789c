// @ts-check
/**
 * Bundles the package into dist/: index.js for the page, worker.js for the worker, routing/index.js, chunks
 * that they import.
 */
import { readFile } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import { grammarsAsModule } from "./grammars.mjs";
import { buildSmall } from "./shrink.mjs";

const root = fileURLToPath(new URL("..", import.meta.url));

/** The file of the worker. */
export const WORKER = "src/worker/index.ts";

/** What the package exports for browsers, beside the worker. */
export const ENTRIES = {
  index: "src/page/index.ts",
  "routing/index": "src/routing/index.ts",
  openai: "src/openai-fetch/index.ts",
  "ai-sdk": "src/ai-sdk/index.ts",
  react: "src/react/index.ts",
  "prompt-api": "src/prompt-api/index.ts",
};

/** Of the app that imports them: its copy is the one that counts. */
const EXTERNAL = ["@ai-sdk/provider", "react"];

/** The worker's copy, or nothing, by the conditions of what bundles the app (`exports` in package.json). */
const SOURCE = "nearfar/worker-source";
/** For what is bundled once and for all: nothing. */
export const NO_SOURCE = { [SOURCE]: "./src/page/no-worker-source.ts" };

/** The same for Node, Deno and Bun. */
export const NODE_ENTRIES = { index: "src/node/index.ts", worker: "src/node/worker.ts" };

/** The two files that `nearfar/worker-source` can be: the worker in one piece, and nothing. */
async function bundleSources() {
  return buildSmall({
    absWorkingDir: root,
    entryPoints: ["src/page/worker-source.ts", "src/page/no-worker-source.ts"],
    outdir: "dist",
    bundle: true,
    format: "esm",
    target: "es2022",
    minify: true,
    define: { WORKER_SOURCE: JSON.stringify(await workerSource()) },
    write: false,
  });
}

/** The worker without chunks. */
async function workerSource() {
  const { outputFiles } = await buildSmall({
    absWorkingDir: root,
    entryPoints: [WORKER],
    bundle: true,
    format: "esm",
    target: "es2022",
    platform: "browser",
    minify: true,
    legalComments: "none",
    plugins: [grammarsAsModule("browser"), noFormatter, noDecoders],
    write: false,
  });
  return Buffer.from(outputFiles[0]?.contents ?? []).toString();
}

/**
 * Bundles what runs in browsers, in memory, with paths under dist/. Page and worker apart: they have little in
 * common, and a chunk of it would be a request more for both.
 */
export async function bundle() {
  const page = await buildSmall({
    ...inChunks("dist", false),
    entryPoints: ENTRIES,
    external: [...EXTERNAL, SOURCE],
  });
  const worker = await bundleWorker({ outdir: "dist", write: false });
  const { metafile } = page;
  const sources = await bundleSources();
  return {
    metafile: {
      inputs: { ...metafile.inputs, ...worker.metafile.inputs },
      outputs: { ...metafile.outputs, ...worker.metafile.outputs },
    },
    outputFiles: [...page.outputFiles, ...worker.outputFiles, ...sources.outputFiles],
  };
}

/**
 * Bundles the worker: its core, and a chunk for each thing that is loaded when it is wanted.
 * @param {{ outdir: string, write: boolean }} options
 */
export async function bundleWorker({ outdir, write }) {
  return buildSmall({
    ...inChunks(outdir, write),
    entryPoints: { worker: WORKER },
    plugins: [grammarsAsModule("browser"), noFormatter, noDecoders, oneCore],
  });
}

/**
 * @param {string} outdir
 * @param {boolean} write
 */
function inChunks(outdir, write) {
  return /** @type {const} */ ({
    absWorkingDir: root,
    outdir,
    bundle: true,
    splitting: true,
    format: "esm",
    target: "es2022",
    platform: "browser",
    minify: true,
    sourcemap: "linked",
    legalComments: "eof",
    chunkNames: "chunks/[name]-[hash]",
    write,
  });
}

/**
 * Jinja's Template can also print a template anew, which nobody asks of it here; a method is not left out by
 * itself.
 * @type {import("esbuild").Plugin}
 */
export const noFormatter = {
  name: "no formatter of templates",
  setup(plugged) {
    plugged.onLoad({ filter: /@huggingface[\\/]jinja[\\/]dist[\\/]index\.js$/ }, async ({ path }) => {
      const text = await readFile(path, "utf8");
      const method = /\n {2}format\(options\) \{\n.*\n {2}\}\n/;
      if (!method.test(text)) throw new Error(`${path} has another Template.format than noFormatter expects`);
      return { contents: text.replace(method, "\n") };
    });
  },
};

/**
 * The library of tokenizers can also make text of tokens, whole texts alone; ours does it token by token
 * (src/worker/text/stream.ts). Classes with a parent are not left out by themselves.
 * @type {import("esbuild").Plugin}
 */
export const noDecoders = {
  name: "no decoders of tokens",
  setup(plugged) {
    plugged.onLoad(
      { filter: /@huggingface[\\/]tokenizers[\\/]dist[\\/]tokenizers\.mjs$/ },
      async ({ path }) => {
        let contents = await readFile(path, "utf8");
        for (const [part, instead] of /** @type {const} */ ([
          [/\/\/ src\/core\/Decoder\.ts\n.*(?=\/\/ src\/core\/Tokenizer\.ts\n)/s, ""],
          [/create_decoder_default\(this\.tokenizer\.decoder\)/, "null"],
          [/\n {2}decode\(token_ids, .*?\n {2}\}(?=\n)/s, ""],
          [/,\n {2}\w+ as \w*Decoder\b/g, ""],
        ])) {
          if (contents.search(part) < 0) throw new Error(`${path} has another version: it lacks ${part}`);
          contents = contents.replace(part, instead);
        }
        return { contents, loader: "js" };
      },
    );
  },
};

/** What of the worker's is there whatever it loads later: its own imports, and what both backends use. */
const CORE = [
  "serve",
  "../grammar/in-thread",
  "beginning",
  "wanted",
  "gpu/remote-artifact",
  "memory",
  "store/shards",
];

/**
 * esbuild makes a chunk of each set of files that the same entries need, a dozen small ones here. With an
 * import of the whole core added to all that is loaded later, the core is one of them.
 * @type {import("esbuild").Plugin}
 */
const oneCore = {
  name: "one core",
  setup(plugged) {
    const contents = CORE.map((name) => `export * from "./${name}.js";`).join("\n");
    const resolveDir = `${root}src/worker`;
    plugged.onResolve({ filter: /^nearfar:core$/ }, () => ({
      path: "core",
      namespace: "core",
      sideEffects: true,
    }));
    plugged.onLoad({ filter: /./, namespace: "core" }, () => ({ contents, resolveDir }));
    plugged.onResolve({ filter: /^\./ }, async ({ path, kind, pluginData, ...from }) => {
      const isBegin = kind === "dynamic-import" || kind === "entry-point";
      if (!isBegin || pluginData === "resolving") return null;
      const found = await plugged.resolve(path, {
        ...from,
        kind: "import-statement",
        pluginData: "resolving",
      });
      return { ...found, pluginData: "begin" };
    });
    plugged.onLoad({ filter: /\.ts$/ }, async ({ path, pluginData }) => {
      if (pluginData !== "begin") return null;
      return { contents: `${await readFile(path, "utf8")}\nimport "nearfar:core";\n`, loader: "ts" };
    });
  },
};

/** Bundles what runs without a browser, in memory, with paths under dist/. */
export async function bundleNode() {
  return buildSmall({
    absWorkingDir: root,
    entryPoints: NODE_ENTRIES,
    outdir: "dist/node",
    bundle: true,
    splitting: true,
    format: "esm",
    target: "es2022",
    platform: "node",
    alias: NO_SOURCE,
    plugins: [grammarsAsModule("node"), noFormatter, noDecoders],
    minify: true,
    sourcemap: "linked",
    legalComments: "eof",
    chunkNames: "chunks/[name]-[hash]",
    write: false,
  });
}

const GRAMMARS_HERE = "src/here/grammars.ts";

/**
 * What follows grammars is larger than all the rest, and is loaded by what runs without workers only where an
 * answer is to follow one.
 * @type {import("esbuild").Plugin}
 */
const grammarsApart = {
  name: "grammars apart",
  setup({ onResolve }) {
    onResolve({ filter: /^\.\/grammars\.js$/ }, ({ path, importer }) =>
      /[\\/]src[\\/]here[\\/]index\.ts$/.test(importer) ? { path, external: true } : null,
    );
  },
};

/**
 * Bundles in one piece each, in memory, with paths under dist/: what runs without workers, for a service worker
 * may not import later; and what is known before a load, for chunks in common would make the engine's more and
 * larger.
 */
export async function bundleHere() {
  return buildSmall({
    absWorkingDir: root,
    entryPoints: { here: "src/here/index.ts", grammars: GRAMMARS_HERE, models: "src/models/index.ts" },
    outdir: "dist",
    bundle: true,
    format: "esm",
    target: "es2022",
    platform: "browser",
    minify: true,
    alias: NO_SOURCE,
    plugins: [noFormatter, noDecoders, grammarsAsModule("browser"), grammarsApart],
    sourcemap: "linked",
    legalComments: "eof",
    write: false,
  });
}

/**
 * The outputs of a bundle that hold inputs whose path matches.
 *
 * @param {import("esbuild").Metafile["outputs"]} outputs
 * @param {RegExp} inputs
 */
export function madeOf(outputs, inputs) {
  return Object.keys(outputs).filter((path) =>
    Object.keys(outputs[path]?.inputs ?? {}).some((input) => inputs.test(input)),
  );
}
