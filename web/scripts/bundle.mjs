// @ts-check
/**
 * Bundles the package into dist/: index.js for the page, worker.js for the worker, routing/index.js, chunks
 * that they import.
 */
import { rm, writeFile } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const root = fileURLToPath(new URL("..", import.meta.url));

/** What the package exports for browsers, and the file of the worker. */
export const ENTRIES = {
  index: "src/page/index.ts",
  worker: "src/worker/index.ts",
  "routing/index": "src/routing/index.ts",
  openai: "src/openai-fetch/index.ts",
  "ai-sdk": "src/ai-sdk/index.ts",
  react: "src/react/index.ts",
  "prompt-api": "src/prompt-api/index.ts",
};

/** Of the app that imports them: its copy is the one that counts. */
const EXTERNAL = ["@ai-sdk/provider", "react"];

/** The same for Node, Deno and Bun. */
export const NODE_ENTRIES = { index: "src/node/index.ts", worker: "src/node/worker.ts" };

/** The worker without chunks, as `define` for what imports src/page/worker-source.ts. */
export async function workerSource() {
  const { outputFiles } = await build({
    absWorkingDir: root,
    entryPoints: ["src/worker/index.ts"],
    bundle: true,
    format: "esm",
    target: "es2022",
    platform: "browser",
    minify: true,
    legalComments: "none",
    write: false,
  });
  return { WORKER_SOURCE: JSON.stringify(outputFiles[0]?.text) };
}

/**
 * Bundles to disk, or into memory with `write: false`.
 * @param {{ write: boolean }} options
 */
export async function bundle({ write }) {
  return build({
    define: await workerSource(),
    absWorkingDir: root,
    entryPoints: ENTRIES,
    external: EXTERNAL,
    outdir: "dist",
    bundle: true,
    splitting: true,
    format: "esm",
    target: "es2022",
    platform: "browser",
    minify: true,
    sourcemap: write ? "linked" : false,
    legalComments: "eof",
    chunkNames: "chunks/[name]-[hash]",
    metafile: true,
    write,
  });
}

/**
 * Bundles what runs without a browser.
 * @param {{ write: boolean }} options
 */
export async function bundleNode({ write }) {
  return build({
    absWorkingDir: root,
    entryPoints: NODE_ENTRIES,
    outdir: "dist/node",
    bundle: true,
    splitting: true,
    format: "esm",
    target: "es2022",
    platform: "node",
    minify: true,
    sourcemap: write ? "linked" : false,
    legalComments: "eof",
    chunkNames: "chunks/[name]-[hash]",
    write,
  });
}

/**
 * Bundles in one piece each: what runs without workers, for a service worker may not import later; and what
 * is known before a load, for chunks in common would make the engine's more and larger.
 * @param {{ write: boolean }} options
 */
export async function bundleHere({ write }) {
  return build({
    absWorkingDir: root,
    entryPoints: { here: "src/here/index.ts", models: "src/models/index.ts" },
    outdir: "dist",
    bundle: true,
    format: "esm",
    target: "es2022",
    platform: "browser",
    minify: true,
    define: { WORKER_SOURCE: '""' },
    sourcemap: write ? "linked" : false,
    legalComments: "eof",
    write,
  });
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  await rm(new URL("../dist", import.meta.url), { recursive: true, force: true });
  const { metafile } = await bundle({ write: true });
  await Promise.all([bundleNode({ write: true }), bundleHere({ write: true })]);
  await writeFile(new URL("../dist/meta.json", import.meta.url), JSON.stringify(metafile));
}
