/**
 * Bundles the chat page into dist/page/: a folder that any static server can show, with the engine and its
 * worker.
 */
import { createHash } from "node:crypto";
import { cp, readFile, rm } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";
import { workerSource } from "./bundle.mjs";

const root = fileURLToPath(new URL("..", import.meta.url));

await rm(new URL("../dist/page", import.meta.url), { recursive: true, force: true });
const { metafile } = await build({
  define: await workerSource(),
  absWorkingDir: root,
  metafile: true,
  // The engine looks for worker.js beside the script that holds it.
  entryPoints: { main: "page/main.ts", worker: "src/worker/index.ts", style: "page/style.css" },
  outdir: "dist/page",
  bundle: true,
  splitting: true,
  format: "esm",
  target: "es2022",
  platform: "browser",
  minify: true,
  sourcemap: "linked",
  legalComments: "eof",
  chunkNames: "chunks/[name]-[hash]",
});
await cp(new URL("../page/index.html", import.meta.url), new URL("../dist/page/index.html", import.meta.url));
await cp(
  new URL("../../routing/difficulty/model.json", import.meta.url),
  new URL("../dist/page/difficulty.json", import.meta.url),
);

// The service worker keeps what the page is made of, without the worker's copy; another build is another
// version.
const files = Object.keys(metafile.outputs).filter((path) => !/\.map$|chunks\/worker-source-/.test(path));
const hash = createHash("sha256");
for (const path of [...files, "dist/page/difficulty.json", "page/index.html"].sort())
  hash.update(await readFile(new URL(`../${path}`, import.meta.url)));
const shell = {
  version: hash.digest("hex").slice(0, 16),
  files: ["./", "difficulty.json", ...files.map((path) => path.replace(/^dist\/page\//, ""))],
};
await build({
  absWorkingDir: root,
  entryPoints: { sw: "page/sw.ts" },
  outdir: "dist/page",
  bundle: true,
  format: "iife",
  target: "es2022",
  minify: true,
  define: { SHELL: JSON.stringify(shell) },
});
