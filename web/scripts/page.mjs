/** Bundles the chat page into dist/page/: a folder that any static server can show, with the engine and its worker. */
import { cp, rm } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const root = fileURLToPath(new URL("..", import.meta.url));

await rm(new URL("../dist/page", import.meta.url), { recursive: true, force: true });
await build({
  absWorkingDir: root,
  // The engine looks for worker.js beside the script that holds it.
  entryPoints: { main: "page/main.ts", worker: "src/worker.ts", style: "page/style.css" },
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
