import { build } from "esbuild";

await build({
  // The engine looks for worker.js beside the script that holds it.
  entryPoints: { main: "main.js", worker: "nearfar/worker" },
  outdir: "dist",
  bundle: true,
  splitting: true,
  format: "esm",
  minify: true,
});
