/** Requests that every engine accepts and rejects, by the vectors that Python's engine and the server pass. */

import { readFileSync } from "node:fs";
import { describe, expect, test } from "vitest";
import type { Prepared } from "../src/page/completions.js";
import { checkedMessages } from "../src/page/conversation.js";
import { prepareChat, prepareText } from "../src/page/requests.js";
import type { RequestError } from "../src/protocol/errors.js";
import type { ChatCompletionRequest, CompletionRequest, MessageParam } from "../src/protocol/openai.js";
import { parseSampling } from "../src/worker/engine/sampling.js";
import { checkCount } from "../src/worker/session/session.js";

interface Refused {
  readonly param: string;
  readonly says?: string;
  readonly request: object;
}

interface Vectors {
  readonly refused: readonly Refused[];
  readonly refused_on_devices?: readonly Refused[];
  readonly taken: readonly object[];
}

const vectorsOf = (kind: string): Vectors =>
  JSON.parse(readFileSync(new URL(`../../tests/vectors/requests/${kind}.json`, import.meta.url), "utf8"));

/** The checks of both sides: names and kinds on the page, ranges beside the model. */
function check(prepared: Prepared, n: number | null | undefined): void {
  const { options, logprobs } = prepared;
  checkCount(n ?? 1);
  parseSampling(options, logprobs, 97);
}

const KINDS = {
  chat: (request: object): void => {
    const asked = { messages: [{ role: "user", content: "Hello" }], ...request } as ChatCompletionRequest;
    check(prepareChat(asked, "sample"), asked.n);
  },
  completions: (request: object): void => {
    const asked = { prompt: "Hello", ...request } as CompletionRequest;
    check(prepareText(asked, "sample"), asked.n);
  },
};

const { cases } = JSON.parse(
  readFileSync(new URL("../../tests/vectors/requests/messages.json", import.meta.url), "utf8"),
) as { readonly cases: readonly { name: string; messages: MessageParam[]; told: object[] }[] };

test.each(cases)("messages become the same on all surfaces: $name", ({ messages, told }) => {
  expect(checkedMessages(messages)).toEqual(told);
});

describe.each(["chat", "completions"] as const)("a request of %s", (kind) => {
  const { refused, refused_on_devices = [], taken } = vectorsOf(kind);

  test.each([...refused, ...refused_on_devices])(
    "is refused by name: $param in $request",
    ({ param, says, request }) => {
      let failure: RequestError | null = null;
      try {
        KINDS[kind](request);
      } catch (error) {
        failure = error as RequestError;
      }
      expect(failure).toMatchObject({ name: "RequestError", param });
      expect(failure?.message).toContain(says ?? "");
      expect(["invalid-request", "unsupported"]).toContain(failure?.code);
    },
  );

  test.each(taken.map((request) => [request]))("is taken: %j", (request) => KINDS[kind](request));
});
