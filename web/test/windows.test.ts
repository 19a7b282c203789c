import { describe, expect, test } from "vitest";
import type { SamplingOptions } from "../src/protocol/openai.js";
import { EngineCore } from "../src/worker/engine/engine-core.js";
import { parseSampling } from "../src/worker/engine/sampling.js";
import { expectedTokens, FakeBackend, type Windows } from "./support/fake-backend.js";

/** An engine over layers with windows. The backend fails where a row reads a page that it does not have. */

const KINDS: Windows[] = [[null, 40], [40], [null, 70, 3]];

function generate(core: EngineCore, tokens: number[], options: SamplingOptions = {}) {
  return new Promise<{ answer: number[]; cached: number }>((resolve, reject) => {
    const answer: number[] = [];
    const params = parseSampling({ temperature: 0, max_tokens: 12, ...options }, null, 97);
    const request = core.submit(tokens, params, {
      token: (token) => answer.push(token) > 0,
      finish: () => resolve({ answer, cached: request.cachedTokens }),
      fail: reject,
    });
  });
}

/** Pseudo-random tokens, the same in every run. */
function prompt(length: number, salt = 1): number[] {
  return Array.from({ length }, (_, i) => (Math.imul(i + 1, 2654435761 + salt * 40503) >>> 7) % 97);
}

function expected(tokens: readonly number[], windows: Windows, count = 12): number[] {
  return expectedTokens(tokens, count, 97, undefined, windows);
}

/** Pages that a window needs where a step advances by 256 rows. */
const least = (window: number) => Math.ceil((window + 254) / 16) + 1;

describe.each(KINDS.map((windows) => ({ windows, name: windows.join(" and ") })))(
  "windows of $name",
  ({ windows }) => {
    const shape = { pageSize: 16, slots: 4, contextLength: 1024, windows };

    test("answers are those of a straight line, alone and together", async () => {
      const core = new EngineCore(new FakeBackend(shape), [-1]);
      const lengths = [1, 20, 40, 41, 100, 300, 700];
      for (const length of lengths)
        expect((await generate(core, prompt(length, length))).answer).toEqual(
          expected(prompt(length, length), windows),
        );
      const again = await Promise.all(lengths.map((length) => generate(core, prompt(length, 99))));
      again.forEach(({ answer }, i) => {
        expect(answer).toEqual(expected(prompt(lengths[i] ?? 0, 99), windows));
      });
    });

    test("a pool that holds one window does not cut the context", async () => {
      const pages = windows.map((window) => (window === null ? 64 : least(window)));
      const core = new EngineCore(new FakeBackend({ ...shape, pages }), [-1]);
      expect(core.freeTokens).toBeGreaterThanOrEqual(1024);
      const tokens = prompt(700);
      const { answer } = await generate(core, tokens, { max_tokens: 300 });
      expect(answer).toEqual(expected(tokens, windows, 300));
      expect(core.freeTokens, "everything was given back").toBeGreaterThanOrEqual(1024);
    });

    test("prompts that wait for each other's windows come through", async () => {
      const pages = windows.map((window) => (window === null ? 200 : least(window) + 3));
      const core = new EngineCore(new FakeBackend({ ...shape, pages }), [-1]);
      const prompts = [
        prompt(900, 1),
        prompt(850, 2),
        prompt(60, 3),
        prompt(400, 4),
        [...prompt(900, 1).slice(0, 300), 5],
      ];
      const answers = await Promise.all(prompts.map((tokens) => generate(core, tokens)));
      answers.forEach(({ answer }, i) => {
        expect(answer, `prompt ${i}`).toEqual(expected(prompts[i] ?? [], windows));
      });
    });

    test("a conversation goes on from the pages of its window", async () => {
      const core = new EngineCore(new FakeBackend(shape), [-1]);
      const first = prompt(200);
      const { answer } = await generate(core, first);
      const longer = [...first, ...answer, ...prompt(20, 2)];
      const next = await generate(core, longer);
      expect(next.cached).toBe(208);
      expect(next.answer).toEqual(expected(longer, windows));
    });
  },
);
