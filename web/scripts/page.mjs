/**
 * Bundles the chat page into dist/page/: a folder that any static server can show, with the engine and its
 * worker.
 */
import { createHash } from "node:crypto";
import { cp, readFile, rm, writeFile } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";
import { bundleWorker, inChunks, madeOf, NO_SOURCE } from "./bundle.mjs";
import { noticesOf } from "./notices.mjs";

const root = fileURLToPath(new URL("..", import.meta.url));

await rm(new URL("../dist/page", import.meta.url), { recursive: true, force: true });
const page = await build({
  metafile: true,
  alias: NO_SOURCE,
  ...inChunks("dist/page", true),
  entryPoints: { main: "chat/main.ts", style: "chat/style.css" },
});
// The engine looks for worker.js beside the script that holds it.
const worker = await bundleWorker({ write: true, outdir: "dist/page" });
await cp(new URL("../chat/index.html", import.meta.url), new URL("../dist/page/index.html", import.meta.url));
await cp(
  new URL("../../routing/difficulty/model.json", import.meta.url),
  new URL("../dist/page/difficulty.json", import.meta.url),
);
await writeFile(
  new URL("../dist/page/NOTICES.txt", import.meta.url),
  await noticesOf([page.metafile, worker.metafile]),
);

// The service worker keeps what the page is made of; another build is another version.
const outputs = { ...page.metafile.outputs, ...worker.metafile.outputs };
const files = Object.keys(outputs).filter((path) => !/\.map$/.test(path));
// A megabyte that only answers in JSON need: it is kept once one of them has asked for it.
const late = madeOf(outputs, /web-xgrammar/).filter((path) => files.includes(path));
if (late.length === 0) throw new Error("the page has no chunk of its grammar library");
const name = (path) => path.replace(/^dist\/page\//, "");
const hash = createHash("sha256");
for (const path of [...files, "dist/page/difficulty.json", "chat/index.html"].sort())
  hash.update(await readFile(new URL(`../${path}`, import.meta.url)));
const shell = {
  version: hash.digest("hex").slice(0, 16),
  files: ["./", "difficulty.json", ...files.filter((path) => !late.includes(path)).map(name)],
  late: late.map(name),
};
await build({
  absWorkingDir: root,
  entryPoints: { sw: "chat/sw.ts" },
  outdir: "dist/page",
  bundle: true,
  format: "iife",
  target: "es2022",
  minify: true,
  define: { SHELL: JSON.stringify(shell) },
});
