import { createEngine } from "nearfar/node";

const engine = await createEngine("model/");
const stream = await engine.chat.completions.create({
  messages: [{ role: "user", content: "Tell me a story." }],
  max_tokens: 24,
  stream: true,
});
const text = new TextEncoder();
for await (const chunk of stream) await Deno.stdout.write(text.encode(chunk.choices[0]?.delta.content ?? ""));
// Not `engine.dispose()`: Deno may crash where it ends its GPU in a worker while the program ends too.
Deno.exit();
