import { Worker } from "node:worker_threads";
import { createEngine } from "nearfar/node";

const worker = () => new Worker(new URL("./gpu-worker.mjs", import.meta.url));
const engine = await createEngine("model/", { worker });
const stream = await engine.chat.completions.create({
  messages: [{ role: "user", content: "Tell me a story." }],
  max_tokens: 24,
  stream: true,
});
for await (const chunk of stream) process.stdout.write(chunk.choices[0]?.delta.content ?? "");
await engine.dispose();
