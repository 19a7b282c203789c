// @ts-check
/** Bundles the package into dist/: index.js for the page, worker.js for the worker, routing/index.js, chunks that they import. */
import { rm, writeFile } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const root = fileURLToPath(new URL("..", import.meta.url));

/**
 * Bundles to disk, or into memory with `write: false`.
 * @param {{ write: boolean }} options
 */
export function bundle({ write }) {
  return build({
    absWorkingDir: root,
    entryPoints: ["src/index.ts", "src/worker.ts", "src/routing/index.ts"],
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

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  await rm(new URL("../dist", import.meta.url), { recursive: true, force: true });
  const { metafile } = await bundle({ write: true });
  await writeFile(new URL("../dist/meta.json", import.meta.url), JSON.stringify(metafile));
}
