import { describe, expect, test } from "vitest";
import { DeviceError } from "../src/protocol/errors.js";
import type { SamplingOptions } from "../src/protocol/openai.js";
import { SequenceTable } from "../src/worker/cache/sequence-table.js";
import { EngineCore } from "../src/worker/engine/engine-core.js";
import { Request, type RequestListener } from "../src/worker/engine/request.js";
import { parseSampling } from "../src/worker/engine/sampling.js";
import { type Bucket, Scheduler } from "../src/worker/engine/scheduler.js";
import { expectedTokens, FakeBackend } from "./support/fake-backend.js";
import { FAULTS, FaultyBackend } from "./support/faults.js";

const PAGE = 4;
const SHAPE = { pageSize: PAGE, slots: 4, pages: 40, contextLength: 96 };

function prompt(length: number, salt = 1): number[] {
  return Array.from({ length }, (_, i) => (Math.imul(i + 1, 2654435761 + salt * 40503) >>> 7) % 97);
}

function generate(core: EngineCore, tokens: number[], options: SamplingOptions = {}): Promise<number[]> {
  return new Promise((resolve, reject) => {
    const answer: number[] = [];
    core.submit(tokens, parseSampling({ temperature: 0, ...options }, null, 97), {
      token: (token) => answer.push(token) > 0,
      finish: () => resolve(answer),
      fail: reject,
    });
  });
}

/** Prompts longer than a page with a common beginning, more than there are slots; one is sampled with a seed. */
const JOBS = [
  { tokens: prompt(41), seed: null },
  { tokens: [...prompt(41).slice(0, 30), ...prompt(9, 3)], seed: null },
  { tokens: prompt(70, 2), seed: null },
  { tokens: prompt(7, 5), seed: 11n },
  { tokens: prompt(23, 6), seed: null },
];
const COUNT = 6;

function run(core: EngineCore): Promise<PromiseSettledResult<number[]>[]> {
  const answers = JOBS.map(async ({ tokens, seed }) =>
    generate(core, tokens, { max_tokens: COUNT, ...(seed !== null && { temperature: 0.7, seed }) }),
  );
  return Promise.allSettled(answers);
}

/** Checks that every answer equals that of an engine without faults, or is an error that names the device. */
function check(results: PromiseSettledResult<number[]>[], when: string): void {
  for (const [i, result] of results.entries()) {
    const { tokens, seed } = JOBS[i] ?? { tokens: [], seed: null };
    if (result.status === "fulfilled")
      expect(result.value, when).toEqual(expectedTokens(tokens, COUNT, 97, seed ?? undefined));
    else expect(result.reason, when).toBeInstanceOf(DeviceError);
  }
}

describe("a step that fails", () => {
  test.each(FAULTS)("leaves nothing wrong behind, whichever call it was (%s)", async (fault) => {
    const clean = new FaultyBackend(new FakeBackend(SHAPE), -1, fault);
    await run(new EngineCore(clean, [-1]));
    expect(clean.calls).toBeGreaterThan(50);
    for (let at = 0; at < clean.calls; at++) {
      const backend = new FaultyBackend(new FakeBackend(SHAPE), at, fault);
      const core = new EngineCore(backend, [-1]);
      const first = await run(core);
      expect(backend.failed, `call ${at}`).not.toBeNull();
      check(first, `${fault}: ${backend.failed}, call ${at}`);
      const after = await run(core);
      check(after, `after ${fault}: ${backend.failed}, call ${at}`);
      for (const result of after)
        if (result.status === "rejected")
          expect(String(result.reason)).toMatch(/Load the model again|failed/);
    }
  });

  test("has put no page into the prefix index: pages are entered when their step has been read", () => {
    const { table, scheduler } = parts();
    const request = requestOf(prompt(16));
    scheduler.add(request);
    const step = scheduler.schedule(null);
    if (!step) throw new Error("nothing was scheduled");
    scheduler.launched(step);
    expect(table.index.nodes()).toEqual([]);
    scheduler.read(step);
    expect(table.index.nodes()).toHaveLength(4);
  });

  test("does not lose the page copies that were due before it", () => {
    const { table, scheduler } = parts(4);
    const [one, other] = [requestOf(prompt(6)), requestOf(prompt(4, 2))];
    for (const request of [one, other]) scheduler.add(request);
    const step = scheduler.schedule(null);
    if (!step) throw new Error("nothing was scheduled");
    scheduler.launched(step);
    scheduler.read(step);
    // Another sequence shares the last page of `one`, so the page is copied before it is written.
    const shared = one.sequence && table.fork(one.sequence);
    if (!one.sequence || !shared) throw new Error("no slot is free");
    const tail = one.sequence.held[0]?.pages[1];
    // `one` gets its copy; then no page is left for `other` while a step is in flight: nothing can be planned
    // yet.
    expect(scheduler.schedule(step)).toBeNull();
    expect(one.sequence.held[0]?.pages[1]).not.toBe(tail);
    table.release(shared);
    for (const request of [one, other]) {
      request.tokens.push(3);
      request.pending = 0;
    }
    expect(scheduler.schedule(null)?.copies).toEqual([[0, tail, one.sequence.held[0]?.pages[1]]]);
  });
});

describe("logits that are not finite", () => {
  test("end their request by name and leave the others alone", async () => {
    const backend = new FakeBackend(SHAPE);
    const core = new EngineCore(backend, []);
    const bad = prompt(30, 8);
    backend.notFinite = (seen) => seen.length === 33 && seen[0] === bad[0];
    const lost = generate(core, bad, { max_tokens: 9 });
    const others = [prompt(12, 9), prompt(27, 10)];
    const answers = others.map((tokens) => generate(core, tokens, { max_tokens: 12 }));
    await expect(lost).rejects.toThrow(/logits were not finite.*after 3 tokens/);
    await expect(lost).rejects.toBeInstanceOf(DeviceError);
    for (const [i, answer] of answers.entries())
      expect(await answer).toEqual(expectedTokens(others[i] ?? [], 12));
    // The engine continues, and the pages that it keeps of the failed request are valid.
    backend.notFinite = () => false;
    expect(await generate(core, bad, { max_tokens: 9 })).toEqual(expectedTokens(bad, 9));
  });
});

test("a listener that throws at its end ends its own request alone", async () => {
  const core = new EngineCore(new FakeBackend(SHAPE), [-1]);
  const failed = new Promise<Error>((resolve) => {
    core.submit(prompt(5), parseSampling({ temperature: 0, max_tokens: 2 }, null, 97), {
      token: () => true,
      finish: () => {
        throw new Error("a codec's fault");
      },
      fail: resolve,
    });
  });
  const other = generate(core, prompt(9, 2), { max_tokens: 8 });
  expect((await failed).message).toBe("a codec's fault");
  expect(await other).toEqual(expectedTokens(prompt(9, 2), 8));
});

const BUCKETS: Bucket[] = [1, 4, 16, 64].map((size) => ({ size, logits: Math.min(size, 16) }));
const SILENT: RequestListener = { token: () => true, finish: () => undefined, fail: () => undefined };

function parts(pages = 40): { table: SequenceTable; scheduler: Scheduler } {
  const table = new SequenceTable([pages], PAGE, 4);
  return { table, scheduler: new Scheduler(table, BUCKETS, 96) };
}

function requestOf(tokens: number[]): Request {
  return new Request(tokens, parseSampling({ temperature: 0 }, null, 97), 20, SILENT);
}
