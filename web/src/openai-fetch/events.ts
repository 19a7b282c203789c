import { problemOf } from "./problem.js";

/**
 * Chunks as server-sent events, with `[DONE]` at the end. An error becomes an event of OpenAI's error shape;
 * an abort by `signal` throws, as the bodies of fetch do.
 */
export async function* eventsOf(
  chunks: AsyncIterable<unknown>,
  signal: AbortSignal,
): AsyncGenerator<Uint8Array> {
  const encoder = new TextEncoder();
  const event = (data: string): Uint8Array => encoder.encode(`data: ${data}\n\n`);
  try {
    for await (const chunk of chunks) yield event(JSON.stringify(chunk));
    yield event("[DONE]");
  } catch (error) {
    signal.throwIfAborted();
    yield event(JSON.stringify(problemOf(error).body));
  }
}
