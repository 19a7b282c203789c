// @ts-check
/**
 * Bundles the package into dist/: index.js for the page, worker.js for the worker, routing/index.js, chunks
 * that they import.
 */
import { fileURLToPath } from "node:url";
import { build } from "esbuild";
import { grammarsAsModule } from "./grammars.mjs";

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
  return build({
    metafile: true,
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
  const { outputFiles } = await build({
    absWorkingDir: root,
    entryPoints: [WORKER],
    bundle: true,
    format: "esm",
    target: "es2022",
    platform: "browser",
    minify: true,
    legalComments: "none",
    plugins: [grammarsAsModule("browser")],
    write: false,
  });
  return Buffer.from(outputFiles[0]?.contents ?? []).toString();
}

/**
 * Bundles what runs in browsers, in memory, with paths under dist/. Page and worker apart: they have little in
 * common, and a chunk of it would be a request more for both.
 */
export async function bundle() {
  const page = await build({
    metafile: true,
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
    outputFiles: [...(page.outputFiles ?? []), ...(worker.outputFiles ?? []), ...sources.outputFiles],
  };
}

/**
 * Bundles the worker: its core, and a chunk for each thing that is loaded when it is wanted.
 * @param {{ outdir: string, write: boolean }} options
 */
export async function bundleWorker({ outdir, write }) {
  return build({
    metafile: true,
    ...inChunks(outdir, write),
    entryPoints: { worker: WORKER },
    plugins: [grammarsAsModule("browser")],
  });
}

/**
 * @param {string} outdir
 * @param {boolean} write
 */
export function inChunks(outdir, write) {
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

/** Bundles what runs without a browser, in memory, with paths under dist/. */
export async function bundleNode() {
  return build({
    metafile: true,
    absWorkingDir: root,
    entryPoints: NODE_ENTRIES,
    outdir: "dist/node",
    bundle: true,
    splitting: true,
    format: "esm",
    target: "es2022",
    platform: "node",
    alias: NO_SOURCE,
    plugins: [grammarsAsModule("node")],
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
  return build({
    metafile: true,
    absWorkingDir: root,
    entryPoints: { here: "src/here/index.ts", grammars: GRAMMARS_HERE, models: "src/models/index.ts" },
    outdir: "dist",
    bundle: true,
    format: "esm",
    target: "es2022",
    platform: "browser",
    minify: true,
    alias: NO_SOURCE,
    plugins: [grammarsAsModule("browser"), grammarsApart],
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
