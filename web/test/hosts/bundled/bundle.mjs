// Bundles app.mjs into a folder: bundle.mjs PACKAGE OUT, with the package as it is installed.
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const [installed, out] = process.argv.slice(2);
await build({
  entryPoints: {
    app: fileURLToPath(new URL("./app.mjs", import.meta.url)),
    "engine-worker": "nearfar/node/worker",
  },
  outdir: out,
  outExtension: { ".js": ".mjs" },
  bundle: true,
  format: "esm",
  platform: "node",
  nodePaths: [installed],
});
