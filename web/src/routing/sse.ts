/*! eventsource-parser | Copyright (c) 2026 Espen Hovlandsdal | MIT | https://github.com/rexxars/eventsource-parser */
/** Server-sent events, as far as OpenAI's streams use them: events of JSON, the last one `[DONE]`. */

import { createParser } from "eventsource-parser";
import { CloudError } from "../protocol/errors.js";

/** Characters that one event may have: an answer's pieces are small, and a cloud may be hostile. */
const LARGEST = 1 << 22;

/**
 * Yields the JSON values of a body's events. Leaving the loop cancels the body. CloudError ("shape") for
 * invalid JSON.
 */
export async function* events(body: ReadableStream<Uint8Array>): AsyncGenerator<unknown> {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  const come: string[] = [];
  let tooLarge = false;
  const parser = createParser({
    maxBufferSize: LARGEST,
    onEvent: ({ data }) => void come.push(data),
    onError: ({ type }) => {
      tooLarge ||= type === "max-buffer-size-exceeded";
    },
  });
  try {
    for (let ended = false; !ended; ) {
      const { done, value } = await reader.read();
      ended = done;
      // The last event counts even without the blank line that a cut or careless peer leaves out.
      parser.feed(done ? `${decoder.decode()}\n\n` : decoder.decode(value, { stream: true }));
      for (const data of come.splice(0)) {
        if (data === "[DONE]") return;
        yield parsed(data);
      }
      if (tooLarge)
        throw new CloudError(`The cloud sent an event of more than ${LARGEST} characters.`, "shape");
    }
  } finally {
    // On an abort the body has failed already.
    await reader.cancel().catch(() => undefined);
  }
}

function parsed(data: string): unknown {
  try {
    return JSON.parse(data);
  } catch {
    throw new CloudError("The cloud sent an event that is not JSON.", "shape");
  }
}

/** The first `most` bytes of a body as text: a server's error message, or a hostile body. */
export async function textOf(body: ReadableStream<Uint8Array> | null, most = 1 << 16): Promise<string> {
  if (!body) return "";
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let text = "";
  try {
    for (let bytes = 0; bytes < most; ) {
      const { done, value } = await reader.read();
      if (done) break;
      const kept = value.subarray(0, most - bytes);
      bytes += kept.length;
      text += decoder.decode(kept, { stream: true });
    }
    return text;
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}
