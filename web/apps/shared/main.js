import { createEngine, sharedEngine } from "nearfar";

async function main() {
  const engine = await createEngine("/model/", { worker: () => sharedEngine() });
  const stream = await engine.chat.completions.create({
    messages: [{ role: "user", content: "Tell me a story." }],
    max_tokens: 24,
    stream: true,
  });
  const answer = document.querySelector("#answer");
  for await (const chunk of stream) answer.append(chunk.choices[0]?.delta.content ?? "");
  await engine.dispose();
}

main();
