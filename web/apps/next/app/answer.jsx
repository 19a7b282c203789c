"use client";

import { createEngine } from "nearfar";
import { useEffect, useState } from "react";

export function Answer() {
  const [text, setText] = useState("");
  useEffect(() => {
    const leaving = new AbortController();
    const { signal } = leaving;
    const ask = async () => {
      const engine = await createEngine("/model/", { signal });
      const stream = await engine.chat.completions.create({
        messages: [{ role: "user", content: "Tell me a story." }],
        max_tokens: 24,
        stream: true,
        signal,
      });
      for await (const chunk of stream) setText((before) => before + (chunk.choices[0]?.delta.content ?? ""));
      await engine.dispose();
    };
    ask().catch((error) => signal.aborted || setText(String(error)));
    return () => leaving.abort();
  }, []);
  return <p id="answer">{text}</p>;
}
