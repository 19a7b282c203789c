import { problemOf } from "./problem.js";

/**
 * Chunks as server-sent events, with `[DONE]` at the end. An error becomes an event of OpenAI's error shape;
 * an abort by `signal` throws, as the bodies of fetch do. `named`: events have the names of their types, as in
 * the Responses API, and no `[DONE]` at the end.
 */
export async function* eventsOf(
  chunks: AsyncIterable<unknown>,
  signal: AbortSignal,
  named: boolean,
): AsyncGenerator<Uint8Array> {
  const encoder = new TextEncoder();
  const event = (chunk: unknown): Uint8Array => {
    const name = named ? `event: ${(chunk as { type: string }).type}\n` : "";
    return encoder.encode(`${name}data: ${JSON.stringify(chunk)}\n\n`);
  };
  try {
    for await (const chunk of chunks) yield event(chunk);
    if (!named) yield encoder.encode("data: [DONE]\n\n");
  } catch (error) {
    signal.throwIfAborted();
    const { body } = problemOf(error);
    yield event(named ? { ...body.error, ...body, type: "error" } : body);
  }
}
