/** OpenAI's Responses API over chat completions, by the vectors that Python's engine and the server pass. */

import { readFileSync } from "node:fs";
import { describe, expect, test } from "vitest";
import type { Answerer } from "../src/protocol/answerer.js";
import type { RequestError } from "../src/protocol/errors.js";
import type { MessageParam } from "../src/protocol/openai.js";
import { chatOf } from "../src/responses/asking.js";
import { checked } from "../src/responses/checks.js";
import { respond } from "../src/responses/index.js";
import { type Piece, ResponseRecords } from "../src/responses/shape.js";
import type { ResponseEvent, ResponseRequest, WholeResponse } from "../src/responses/types.js";

const vectorsOf = (name: string): unknown =>
  JSON.parse(readFileSync(new URL(`../../tests/vectors/responses/${name}.json`, import.meta.url), "utf8"));

interface Taken {
  readonly name: string;
  readonly before?: readonly MessageParam[];
  readonly request: object;
  readonly chat: object;
}
const { taken, refused } = vectorsOf("requests") as {
  readonly taken: readonly Taken[];
  readonly refused: readonly { readonly param: string; readonly request: object }[];
};

test.each(taken)("a request becomes the chat of the vectors: $name", ({ request, before = [], chat }) => {
  expect(chatOf(checked(request), before)).toEqual(chat);
});

test.each(refused)("is refused by name: $param in $request", ({ param, request }) => {
  let failure: RequestError | null = null;
  try {
    chatOf(checked(request), []);
  } catch (error) {
    failure = error as RequestError;
  }
  expect(failure?.name).toBe("RequestError");
  expect(failure?.param).toBe(param);
});

interface Case {
  readonly name: string;
  readonly request: object;
  readonly usage: readonly [number, number, number];
  readonly pieces: readonly (Omit<Piece, "calls"> & {
    readonly calls?: readonly { index: number; id: string; name: string; arguments: string }[];
  })[];
  readonly events: readonly object[];
}
const { cases } = vectorsOf("events") as { readonly cases: readonly Case[] };

test.each(cases)(
  "an answer becomes the events of the vectors: $name",
  ({ request, usage, pieces, events }) => {
    let made = 0;
    const ids = (prefix: string): string => `${prefix}_${made++}`;
    const records = new ResponseRecords("resp_0", "sample", checked(request), true, ids);
    const found = [...records.begin()];
    for (const { calls = [], ...piece } of pieces) {
      const parts = calls.map(({ index, id, name, arguments: given }) => ({
        index,
        ...(id && { id }),
        function: { name, arguments: given },
      }));
      found.push(...records.piece({ ...piece, calls: parts }));
    }
    const [prompt, completion, cached] = usage;
    found.push(...records.end({ prompt, completion, cached }));
    for (const { response } of found as { response?: Record<string, unknown> }[]) {
      if (!response) continue;
      response.created_at = 0;
      response.completed_at &&= 0;
    }
    expect(JSON.parse(JSON.stringify(found))).toEqual(events);
  },
);

/** An engine that records its requests, and whether its stream was abandoned. */
function echoing(): { readonly engine: Answerer; readonly asked: object[]; left: number } {
  const made = { asked: [] as object[], left: 0 };
  const create = async (request: object): Promise<AsyncIterable<unknown>> => {
    made.asked.push(request);
    const chunks = (async function* () {
      yield { choices: [{ index: 0, delta: { role: "assistant", content: "" }, finish_reason: null }] };
      yield { choices: [{ index: 0, delta: { content: "Hi" }, finish_reason: null }] };
      yield { choices: [{ index: 0, delta: {}, finish_reason: "stop" }] };
      yield { choices: [], usage: { prompt_tokens: 3, completion_tokens: 1, total_tokens: 4 } };
    })();
    const leave = chunks.return.bind(chunks);
    return Object.assign(chunks, {
      return: (value: undefined) => {
        made.left++;
        return leave(value);
      },
    });
  };
  return Object.assign(made, { engine: { chat: { completions: { create } }, model: { name: "toy" } } });
}

const whole = async (engine: Answerer, request: ResponseRequest): Promise<WholeResponse> =>
  (await respond(engine, request)) as WholeResponse;

describe("responses of an engine", () => {
  test("are kept for the requests that continue them", async () => {
    const { engine, asked } = echoing();
    const first = await whole(engine, { input: "Hello", instructions: "Be brief." });
    expect(first).toMatchObject({ output_text: "Hi", status: "completed", usage: { total_tokens: 4 } });
    const [said] = first.output;
    await whole(engine, { input: "Again", previous_response_id: first.id });
    await whole(engine, {
      input: [
        { type: "item_reference", id: said?.id ?? "" },
        { role: "user", content: "So?" },
      ],
    });
    const told = asked.map((request) => (request as { messages: readonly object[] }).messages.length);
    // Instructions do not carry over; the conversation does.
    expect(told).toEqual([2, 3, 2]);
    expect(asked[2]).toMatchObject({ messages: [{ role: "assistant", content: "Hi" }, { role: "user" }] });
  });

  test("are lost where store is false, after many others, and to another engine", async () => {
    const { engine } = echoing();
    const unstored = await whole(engine, { input: "Hello", store: false });
    const oldest = await whole(engine, { input: "Hello" });
    const lost = async (one: Answerer, id: string): Promise<void> => {
      const asked = respond(one, { input: "Again", previous_response_id: id });
      await expect(asked).rejects.toMatchObject({ name: "RequestError", param: "previous_response_id" });
    };
    await lost(engine, unstored.id);
    await lost(echoing().engine, oldest.id);
    for (let count = 0; count < 64; count++) await whole(engine, { input: "Hello" });
    await lost(engine, oldest.id);
    await expect(respond(engine, { input: [{ type: "item_reference", id: "x" }] })).rejects.toThrow(
      "no item",
    );
  });

  test("end the answer when their events are left, even before the first", async () => {
    const source = echoing();
    const unread = (await respond(source.engine, {
      input: "Hello",
      stream: true,
    })) as AsyncGenerator<ResponseEvent>;
    await unread.return(undefined);
    expect(source.left).toBe(1);
    for await (const { type } of (await respond(source.engine, {
      input: "Hello",
      stream: true,
    })) as AsyncIterable<ResponseEvent>)
      if (type === "response.output_text.delta") break;
    expect(source.left).toBeGreaterThan(1);
  });

  test("an effort and a verbosity are variables of the template", async () => {
    const { engine, asked } = echoing();
    await whole(engine, { input: "Hello", reasoning: { effort: "none" }, text: { verbosity: "low" } });
    const variables = { reasoning_effort: "none", verbosity: "low", enable_thinking: false, thinking: false };
    expect(asked[0]).toMatchObject({ chat_template_kwargs: variables, stream: true });
  });
});
