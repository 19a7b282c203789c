import { createEngine, sharedEngine } from "./nearfar/index.js";

const engine = await createEngine("/model/", {
  worker: async () => {
    const { active } = await navigator.serviceWorker.ready;
    const { port1, port2 } = new MessageChannel();
    active.postMessage("connect", [port2]);
    return sharedEngine(port1);
  },
});
const stream = await engine.chat.completions.create({
  messages: [{ role: "user", content: "Tell me a story." }],
  max_tokens: 24,
  stream: true,
});
const answer = document.querySelector("#answer");
for await (const chunk of stream) answer.append(chunk.choices[0]?.delta.content ?? "");
await engine.dispose();
