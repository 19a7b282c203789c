/** Responses of a hostile cloud: the client gets pieces of the right types, or one of our errors. */

import fc from "fast-check";
import { expect, test } from "vitest";
import { CloudError } from "../../src/protocol/errors.js";
import { pieceIn } from "../../src/routing/chunks.js";
import { Cloud } from "../../src/routing/cloud.js";
import { DEFAULT_POLICY, parsePolicy } from "../../src/routing/policy.js";
import { events } from "../../src/routing/sse.js";
import { effort } from "./effort.js";

const REQUEST = { messages: [{ role: "user", content: "Go" }], max_tokens: 5 };

function bodyOf(parts: readonly Uint8Array[]): ReadableStream<Uint8Array> {
  return new ReadableStream({
    start: (controller) => {
      for (const part of parts) controller.enqueue(part);
      controller.close();
    },
  });
}

async function read(parts: readonly Uint8Array[]): Promise<unknown[]> {
  const found: unknown[] = [];
  for await (const value of events(bodyOf(parts))) found.push(value);
  return found;
}

const choice = fc.record(
  {
    index: fc.jsonValue(),
    delta: fc.oneof(
      fc.jsonValue(),
      fc.dictionary(fc.constantFrom("content", "tool_calls", "reasoning_content"), fc.jsonValue()),
    ),
    finish_reason: fc.oneof(fc.constantFrom("stop", null), fc.jsonValue()),
    logprobs: fc.oneof(fc.jsonValue(), fc.record({ content: fc.jsonValue() })),
  },
  { requiredKeys: [] },
);
const chunk = fc.record(
  {
    choices: fc.oneof(fc.array(choice), fc.jsonValue()),
    usage: fc.oneof(
      fc.jsonValue(),
      fc.record({ prompt_tokens: fc.jsonValue(), completion_tokens: fc.jsonValue() }),
    ),
    error: fc.jsonValue(),
    model: fc.jsonValue(),
  },
  { requiredKeys: [] },
);
const line = fc.oneof(
  fc.json().map((json) => `data: ${json}`),
  chunk.map((value) => `data: ${JSON.stringify(value)}`),
  fc.constantFrom(
    "",
    "\r",
    "data: [DONE]",
    ": comment",
    "event: x",
    "retry: 1",
    "data:",
    "\uFEFFdata: {}",
    "data: {",
  ),
  fc.string(),
);
const stream = fc.array(line).map((lines) => new TextEncoder().encode(lines.join("\n")));

test("events are the same wherever the bytes are cut, or an error of ours", async () => {
  await fc.assert(
    fc.asyncProperty(stream, fc.nat(), async (bytes, at) => {
      const cut = at % (bytes.length + 1);
      const outcome = (parts: readonly Uint8Array[]): Promise<unknown> =>
        read(parts).catch((error: unknown) => {
          expect(error).toBeInstanceOf(CloudError);
          return "error";
        });
      expect(await outcome([bytes.subarray(0, cut), bytes.subarray(cut)])).toEqual(await outcome([bytes]));
    }),
    effort(200),
  );
});

test("a chunk is a piece of the right types, or an error of ours", () => {
  fc.assert(
    fc.property(fc.oneof(chunk, fc.jsonValue()), (value) => {
      try {
        const { choices, usage, model } = pieceIn(value);
        expect(typeof model).toBe("string");
        if (usage) expect(Number.isSafeInteger(usage.total_tokens)).toBe(true);
        for (const { delta, finish_reason, logprobs } of choices) {
          for (const text of [delta.content, delta.reasoning_content, finish_reason])
            expect(typeof (text ?? "")).toBe("string");
          for (const call of delta.tool_calls ?? []) expect(call.index).toBeLessThanOrEqual(1000);
          for (const token of logprobs?.content ?? []) expect(typeof token.logprob).toBe("number");
        }
      } catch (error) {
        expect(error).toBeInstanceOf(CloudError);
      }
    }),
    effort(500),
  );
});

test("the side over any bytes and any status gives pieces or errors of ours", async () => {
  await fc.assert(
    fc.asyncProperty(
      fc.oneof(stream, fc.uint8Array()),
      fc.integer({ min: 200, max: 599 }),
      async (bytes, status) => {
        const empty = [204, 205, 304].includes(status);
        const answer = (): Promise<Response> =>
          Promise.resolve(new Response(empty ? null : bodyOf([bytes]), { status }));
        const side = new Cloud(
          { baseURL: "http://localhost", model: "m", fetch: answer },
          DEFAULT_POLICY.timeouts,
        );
        try {
          for await (const { choices } of side.stream(REQUEST, new AbortController().signal))
            for (const { delta } of choices) expect(typeof (delta.content ?? "")).toBe("string");
        } catch (error) {
          expect((error as Error).name).toMatch(/^(CloudError|RequestError)$/);
        }
      },
    ),
    effort(200),
  );
});

test("an event without an end is given up, and so is an endless error", async () => {
  let sent = 0;
  const endless = new ReadableStream<Uint8Array>({
    pull: (controller) => {
      sent += 1 << 16;
      controller.enqueue(new TextEncoder().encode("data: ".padEnd(1 << 16, "x")));
    },
  });
  await expect(
    (async () => {
      for await (const _ of events(endless));
    })(),
  ).rejects.toMatchObject({ name: "CloudError", reason: "shape" });
  expect(sent).toBeLessThan(1 << 24);
  sent = 0;
  const endlessly = (): Promise<Response> =>
    Promise.resolve(
      new Response(
        new ReadableStream<Uint8Array>({
          pull: (controller) => {
            sent += 1 << 16;
            controller.enqueue(new Uint8Array(1 << 16).fill(65));
          },
        }),
        { status: 500 },
      ),
    );
  const side = new Cloud(
    { baseURL: "http://localhost", model: "m", fetch: endlessly },
    DEFAULT_POLICY.timeouts,
  );
  await expect(side.stream(REQUEST, new AbortController().signal).next()).rejects.toMatchObject({
    reason: "500",
  });
  expect(sent).toBeLessThan(1 << 20);
});

test("a policy is one of the right types, or is refused", () => {
  const group = fc.oneof(
    fc.jsonValue(),
    fc.dictionary(fc.constantFrom(...Object.keys(DEFAULT_POLICY.retry), "window", "logprob"), fc.jsonValue()),
  );
  const options = fc.dictionary(
    fc.oneof(fc.constantFrom(...Object.keys(DEFAULT_POLICY)), fc.string()),
    group,
  );
  fc.assert(
    fc.property(fc.oneof(options, fc.jsonValue()), (value) => {
      try {
        const policy = parsePolicy(value as never);
        expect(Object.keys(policy).sort()).toEqual(Object.keys(DEFAULT_POLICY).sort());
        expect(policy.timeouts.connect).toBeGreaterThanOrEqual(0);
      } catch (error) {
        expect((error as Error).name).toBe("RequestError");
      }
    }),
    effort(500),
  );
});
