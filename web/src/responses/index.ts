/** OpenAI's Responses API over the chat completions of an engine or a hybrid client. */

import { type Answerer, streamedChat } from "../protocol/answerer.js";
import { chatOf } from "./asking.js";
import { checked } from "./checks.js";
import { KeptResponses } from "./kept.js";
import { newId, type Piece, ResponseRecords, type TokenCounts } from "./shape.js";
import type { ResponseEvent, ResponseRecord, ResponseRequest, WholeResponse } from "./types.js";

/** The responses of each engine, as long as somebody has it. */
const KEPT = new WeakMap<Answerer, KeptResponses>();

/**
 * Answers a request: as a whole, or with `stream: true` as events. Leaving the loop over the events ends the
 * answer.
 *
 * @throws RequestError naming the wrong parameter, and the errors of chat completions.
 */
export async function respond(
  engine: Answerer,
  request: ResponseRequest,
): Promise<WholeResponse | AsyncIterable<ResponseEvent>> {
  const kept = KEPT.get(engine) ?? new KeptResponses();
  KEPT.set(engine, kept);
  const body = kept.resolved(checked(request));
  const before = kept.messages(body.previous_response_id);
  const { reasoning_effort, verbosity, stream: _stream, ...chat } = chatOf(body, before);
  const { model, user, signal, context_policy, chat_template_kwargs } = body;
  const hints = {
    ...(reasoning_effort && { reasoning_effort }),
    ...(verbosity && { verbosity }),
    ...(reasoning_effort === "none" && { enable_thinking: false, thinking: false }),
    ...chat_template_kwargs,
  };
  const chunks = await streamedChat(engine, {
    ...chat,
    ...(model && { model }),
    ...(user && { user }),
    ...(signal && { signal }),
    ...(context_policy && { context_policy }),
    ...(Object.keys(hints).length > 0 && { chat_template_kwargs: hints }),
  });
  const stored = body.store !== false;
  const name = model ?? engine.model?.name ?? "hybrid";
  const events = eventsOf(new ResponseRecords(newId("resp"), name, body, stored), chunks, (record) => {
    if (stored) kept.keep(record, body, before);
  });
  if (body.stream) return left(events, chunks);
  let last: ResponseRecord | undefined;
  for await (const { response } of events) last = response ?? last;
  const whole = last as ResponseRecord;
  const parts = whole.output.flatMap((item) => (item.type === "message" ? item.content : []));
  return { ...whole, output_text: parts.map(({ text }) => text).join("") };
}

/** Events that end the chunks when they are left, even before the first: a generator that has not begun ends nothing. */
function left(
  events: AsyncGenerator<ResponseEvent>,
  chunks: AsyncIterable<unknown>,
): AsyncIterable<ResponseEvent> {
  const leave = events.return.bind(events);
  return Object.assign(events, {
    return: async (value: unknown) => {
      const done = await leave(value);
      await chunks[Symbol.asyncIterator]().return?.();
      return done;
    },
  });
}

async function* eventsOf(
  records: ResponseRecords,
  chunks: Awaited<ReturnType<typeof streamedChat>>,
  told: (record: ResponseRecord) => void,
): AsyncGenerator<ResponseEvent> {
  let counts: TokenCounts = { prompt: 0, completion: 0, cached: 0 };
  yield* records.begin() as Generator<ResponseEvent>;
  for await (const { choices, usage } of chunks) {
    for (const { delta, finish_reason: finish, logprobs } of choices) {
      const { content, reasoning_content: reasoning, tool_calls: calls } = delta;
      const piece: Piece = {
        finish,
        ...(content && { text: content }),
        ...(reasoning && { reasoning }),
        ...(calls && { calls }),
        ...(logprobs && { logprobs: logprobs.content }),
      };
      yield* records.piece(piece) as Generator<ResponseEvent>;
    }
    if (usage)
      counts = {
        prompt: usage.prompt_tokens,
        completion: usage.completion_tokens,
        cached: usage.prompt_tokens_details?.cached_tokens ?? 0,
      };
  }
  for (const event of records.end(counts) as Generator<ResponseEvent>) {
    const { response } = event;
    if (response) told(response);
    yield event;
  }
}
