import { createEngine } from "nearfar/node";

const engine = await createEngine("model/");
const stream = await engine.chat.completions.create({
  messages: [{ role: "user", content: "Tell me a story." }],
  max_tokens: 24,
  stream: true,
});
for await (const chunk of stream) process.stdout.write(chunk.choices[0]?.delta.content ?? "");
await engine.dispose(); // ends its threads; until then they keep the process alive
