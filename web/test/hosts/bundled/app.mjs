// A program that is bundled: its engine's worker is a file that the bundler names.
import { Worker } from "node:worker_threads";
import { createEngine } from "nearfar/node";

const [artifact, threads] = process.argv.slice(2);
const worker = () => new Worker(new URL("./engine-worker.mjs", import.meta.url));
const engine = await createEngine(artifact, { worker, threads: Number(threads) });
const { choices } = await engine.completions.create({ prompt: "", max_tokens: 199, temperature: 0 });
process.stdout.write(JSON.stringify({ text: choices[0]?.text }));
await engine.dispose();
