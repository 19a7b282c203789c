/** What every engine refuses and takes, by the vectors that Python's engine and the server pass too. */

import { readFileSync } from "node:fs";
import { describe, expect, test } from "vitest";
import type { RequestError } from "../src/both/errors.js";
import type { ChatCompletionRequest } from "../src/both/openai.js";
import { grammarOf } from "../src/page/formats.js";
import { prepareChat } from "../src/page/requests.js";
import { parseSampling } from "../src/worker/engine/sampling.js";
import { checkCount } from "../src/worker/session.js";

interface Vectors {
  readonly refused: readonly { readonly param: string; readonly request: object }[];
  readonly taken: readonly object[];
}

const VECTORS = JSON.parse(
  readFileSync(new URL("../../tests/vectors/requests/chat.json", import.meta.url), "utf8"),
) as Vectors;

/** The checks of both sides: names and kinds on the page, ranges beside the model. */
function check(request: object): void {
  const asked = { messages: [{ role: "user", content: "Hello" }], ...request } as ChatCompletionRequest;
  const { options, logprobs } = prepareChat(asked, "sample", grammarOf);
  checkCount(asked.n ?? 1);
  parseSampling(options, logprobs, 97);
}

describe("a chat request", () => {
  test.each(VECTORS.refused)("is refused by name: $param in $request", ({ param, request }) => {
    let failure: RequestError | null = null;
    try {
      check(request);
    } catch (error) {
      failure = error as RequestError;
    }
    expect(failure).toMatchObject({ name: "RequestError", param });
    expect(["invalid-request", "unsupported"]).toContain(failure?.code);
  });

  test.each(VECTORS.taken.map((request) => [request]))("is taken: %j", (request) => check(request));
});
