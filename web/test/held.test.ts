/** Requests whose next tokens are not known yet wait, and do not hold up others. */

import { expect, test } from "vitest";
import { DeviceLostError } from "../src/protocol/errors.js";
import type { SamplingOptions } from "../src/protocol/openai.js";
import { EngineCore } from "../src/worker/engine/engine-core.js";
import type { Constraint, Request } from "../src/worker/engine/request.js";
import { parseSampling } from "../src/worker/engine/sampling.js";
import { expectedTokens, FakeBackend } from "./support/fake-backend.js";

const WORDS = Math.ceil(97 / 32);
const PROMPT = [5, 6, 7];
const COUNT = 6;

function only(...tokens: number[]): Uint32Array<ArrayBuffer> {
  const words = new Uint32Array(WORDS);
  for (const token of tokens) words[token >> 5] = (words[token >> 5] ?? 0) | (1 << (token & 31));
  return words;
}

/** Makes an answer consist of the tokens of a list; each is known after a call of `release`, or at once. */
class Listed implements Constraint {
  readonly allowed: Uint32Array<ArrayBuffer>;
  readonly seen: number[] = [];
  closed = 0;
  #waiting: (() => void) | null = null;

  constructor(
    private readonly list: readonly number[],
    private readonly late: boolean,
  ) {
    this.allowed = only(list[0] ?? 0);
  }

  async accept(token: number): Promise<Uint32Array<ArrayBuffer> | null> {
    this.seen.push(token);
    if (this.late)
      await new Promise<void>((resolve) => {
        this.#waiting = resolve;
      });
    const next = this.list[this.seen.length];
    return next === undefined ? null : only(next);
  }

  get waits(): boolean {
    return this.#waiting !== null;
  }

  release(): void {
    this.#waiting?.();
    this.#waiting = null;
  }

  close(): void {
    this.closed += 1;
  }
}

interface Answer {
  readonly request: Request;
  readonly done: Promise<{ tokens: number[]; reason: string }>;
}

function ask(
  core: EngineCore,
  constraint: Constraint | null,
  max_tokens: number,
  options: SamplingOptions = {},
): Answer {
  const tokens: number[] = [];
  let request: Request | null = null;
  const done = new Promise<{ tokens: number[]; reason: string }>((resolve, reject) => {
    const listener = {
      token: (token: number) => tokens.push(token) > 0,
      finish: (reason: string) => resolve({ tokens, reason }),
      fail: reject,
    };
    request = core.submit(
      PROMPT,
      parseSampling({ temperature: 0, max_tokens, ...options }, null, 97),
      listener,
      constraint,
    );
  });
  if (!request) throw new Error("the request was not taken");
  return { request, done };
}

const soon = (): Promise<void> => new Promise((resolve) => setTimeout(resolve, 10));

async function until(condition: () => boolean): Promise<void> {
  while (!condition()) await soon();
}

test("two held requests and a free one: each gives what it gives alone", async () => {
  const core = new EngineCore(new FakeBackend(), [-1]);
  const late = new Listed([10, 11, 12], true);
  const quick = new Listed([20, 21], false);
  const first = ask(core, late, 50);
  const [second, free] = [ask(core, quick, 50), ask(core, null, COUNT)];
  await until(() => late.waits);
  expect(await second.done).toEqual({ tokens: [20, 21], reason: "stop" });
  expect((await free.done).tokens).toEqual(expectedTokens(PROMPT, COUNT));
  expect(first.request.done).toBe(false);
  while (!first.request.done) {
    late.release();
    await soon();
  }
  expect(await first.done).toEqual({ tokens: [10, 11, 12], reason: "stop" });
  expect([late.closed, quick.closed]).toEqual([1, 1]);
});

test("an engine whose only request is held rests, and goes on when the mask comes", async () => {
  const core = new EngineCore(new FakeBackend(), [-1]);
  const late = new Listed([10, 11, 12, 13], true);
  const asked = ask(core, late, 2);
  await until(() => late.waits);
  await expect(
    core.alone(
      () => null,
      async () => null,
    ),
  ).rejects.toThrow("answering");
  late.release();
  await until(() => late.waits);
  late.release();
  expect(await asked.done).toEqual({ tokens: [10, 11], reason: "length" });
});

test("an answer that is left while it is held ends, and the mask that comes after changes nothing", async () => {
  const core = new EngineCore(new FakeBackend(), [-1]);
  const late = new Listed([10, 11], true);
  const { request } = ask(core, late, 50);
  await until(() => late.waits);
  core.cancel(request);
  expect(late.closed).toBe(1);
  late.release();
  await soon();
  expect(request.tokens).toEqual([...PROMPT, 10]);
  expect((await ask(core, null, COUNT).done).tokens).toEqual(expectedTokens(PROMPT, COUNT));
});

test("what the last request of a slot might take binds none of the next", async () => {
  const core = new EngineCore(new FakeBackend({ slots: 1 }), [-1]);
  expect((await ask(core, new Listed([10, 11], false), 50).done).tokens).toEqual([10, 11]);
  const { tokens } = await ask(core, null, COUNT, { temperature: 0.5, seed: 1 }).done;
  expect(tokens).toEqual(expectedTokens(PROMPT, COUNT, 97, 1n));
});

test("a constraint that cannot go on ends its own request alone", async () => {
  const core = new EngineCore(new FakeBackend(), [-1]);
  const failing = new Listed([10, 11], false);
  failing.accept = () => Promise.reject(new Error("too long"));
  const [asked, free] = [ask(core, failing, 50), ask(core, null, COUNT)];
  await expect(asked.done).rejects.toThrow("too long");
  expect((await free.done).tokens).toEqual(expectedTokens(PROMPT, COUNT));
});

test("a device that is lost while a request is held changes nothing of its answer", async () => {
  const lost = new FakeBackend();
  const core = new EngineCore(lost, [-1], { reopen: async () => new FakeBackend() });
  const late = new Listed([10, 11, 12], true);
  const asked = ask(core, late, 50);
  await until(() => late.waits);
  lost.failure = new DeviceLostError("gone");
  const free = ask(core, null, COUNT);
  expect((await free.done).tokens).toEqual(expectedTokens(PROMPT, COUNT));
  while (!asked.request.done) {
    late.release();
    await soon();
  }
  expect(await asked.done).toEqual({ tokens: [10, 11, 12], reason: "stop" });
});
