/** The policy "truncate-oldest", by the vectors that all runtimes share. */

import { readFileSync } from "node:fs";
import { describe, expect, test } from "vitest";
import { promptLimit, turnsToDrop, withoutTurns } from "../src/page/context.js";
import type { ChatMessage } from "../src/protocol/openai.js";

interface Vector {
  readonly name: string;
  readonly roles: readonly ChatMessage["role"][];
  readonly tokens: readonly number[];
  readonly limit: number;
  readonly kept: readonly number[];
}

const VECTORS = JSON.parse(
  readFileSync(new URL("../../tests/vectors/context/turns.json", import.meta.url), "utf8"),
) as readonly Vector[];

describe("what is left of a conversation", () => {
  test.each(VECTORS)("$name", async ({ roles, tokens, limit, kept }) => {
    const messages = roles.map((role, at) => ({ role, at, tokens: tokens[at] ?? 0 }));
    let asked = 0;
    const count = async (some: readonly (typeof messages)[number][]): Promise<number> => {
      asked += 1;
      return some.reduce((sum, message) => sum + message.tokens, 0);
    };
    const whole = tokens.reduce((sum, some) => sum + some, 0);
    const dropped = whole <= limit ? 0 : await turnsToDrop(messages, limit, count);
    expect(withoutTurns(messages, dropped).map(({ at }) => at)).toEqual(kept);
    expect(asked).toBeLessThanOrEqual(3);
  });

  test("leaves room for an answer", () => {
    expect([null, 10, 900, 0].map((most) => promptLimit(1024, most))).toEqual([768, 1014, 512, 1024]);
    expect(promptLimit(1, null)).toBe(0);
  });
});
