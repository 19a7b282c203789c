/** Server-sent events, as far as OpenAI's streams use them: `data:` lines of JSON, the last one `[DONE]`. */

/** The JSON values of a body's events. Leaving the loop cancels the body. */
export async function* events(body: ReadableStream<Uint8Array>): AsyncGenerator<unknown> {
  for await (const line of lines(body)) {
    if (!line.startsWith("data:")) continue;
    const data = line.slice(5).trim();
    if (data === "[DONE]") return;
    yield JSON.parse(data);
  }
}

async function* lines(body: ReadableStream<Uint8Array>): AsyncGenerator<string> {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const parts = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = parts.pop() ?? "";
      for (const part of parts) yield part.endsWith("\r") ? part.slice(0, -1) : part;
    }
    if (rest !== "") yield rest;
  } finally {
    // On an abort the body has failed already.
    await reader.cancel().catch(() => undefined);
  }
}
