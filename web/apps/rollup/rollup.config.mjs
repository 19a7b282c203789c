import { nodeResolve } from "@rollup/plugin-node-resolve";

export default {
  // The engine looks for worker.js beside the script that holds it.
  input: { main: "main.js", worker: "nearfar/worker" },
  output: { dir: "dist", entryFileNames: "[name].js", chunkFileNames: "[name]-[hash].js" },
  plugins: [nodeResolve({ browser: true })],
};
