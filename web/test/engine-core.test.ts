import { describe, expect, test } from "vitest";
import { DeviceError, RequestError } from "../src/protocol/errors.js";
import type { RequestStats } from "../src/protocol/messages.js";
import type { FinishReason, SamplingOptions } from "../src/protocol/openai.js";
import { EngineCore } from "../src/worker/engine/engine-core.js";
import type { Request } from "../src/worker/engine/request.js";
import { parseSampling } from "../src/worker/engine/sampling.js";
import { expectedTokens, FakeBackend } from "./support/fake-backend.js";

const NO_END = [-1];

interface Answer {
  readonly tokens: number[];
  readonly reason: FinishReason;
  readonly stats: RequestStats;
}

interface Options extends SamplingOptions {
  /** Ends the answer after this many tokens, as a stop string would. */
  readonly endAfter?: number;
  readonly onToken?: (count: number) => void;
}

function generate(
  core: EngineCore,
  prompt: number[],
  { endAfter, onToken, ...options }: Options,
): Promise<Answer> {
  return new Promise((resolve, reject) => {
    const tokens: number[] = [];
    const params = parseSampling({ temperature: 0, ...options }, null, 97);
    core.submit(prompt, params, {
      token: (token) => {
        tokens.push(token);
        onToken?.(tokens.length);
        return tokens.length !== endAfter;
      },
      finish: (reason, stats) => resolve({ tokens, reason, stats }),
      fail: reject,
    });
  });
}

/** Pseudo-random tokens, the same in every run. */
function prompt(length: number, salt = 1): number[] {
  return Array.from({ length }, (_, i) => (Math.imul(i + 1, 2654435761 + salt * 40503) >>> 7) % 97);
}

test("places of logits without use name the last row that is used", async () => {
  const seen: number[][] = [];
  const backend = new (class extends FakeBackend {
    override write(buffer: string, data: Int32Array, first?: number): void {
      if (buffer === "logit_rows") seen.push([...data]);
      super.write(buffer, data, first);
    }
  })();
  await generate(new EngineCore(backend, NO_END), [5, 6, 7], { max_tokens: 1 });
  expect(seen).toEqual([Array(4).fill(2)]);
});

describe("engine core", () => {
  test("every prompt length gives what one straight line gives", async () => {
    const core = new EngineCore(new FakeBackend({ contextLength: 320 }), NO_END);
    for (let length = 1; length <= 300; length++) {
      const tokens = prompt(length, length);
      const answer = await generate(core, tokens, { max_tokens: 7 });
      expect(answer.tokens, `prompt of ${length}`).toEqual(expectedTokens(tokens, 7));
      expect(answer.reason).toBe("length");
    }
  });

  test("requests together give what each gives alone", async () => {
    const core = new EngineCore(new FakeBackend(), NO_END);
    const jobs = Array.from({ length: 40 }, (_, i) => ({
      tokens: prompt(1 + ((i * 13) % 60), i),
      count: 1 + (i % 23),
    }));
    const answers = await Promise.all(
      jobs.map(({ tokens, count }) => generate(core, tokens, { max_tokens: count })),
    );
    answers.forEach((answer, i) => {
      const job = jobs[i];
      expect(answer.tokens).toEqual(expectedTokens(job?.tokens ?? [], job?.count ?? 0));
    });
  });

  test("too few pages for all: requests give way and come back with the same text", async () => {
    const backend = new FakeBackend({ pages: 40, contextLength: 128 });
    const core = new EngineCore(backend, NO_END);
    const jobs = Array.from({ length: 12 }, (_, i) => prompt(5 + i, i));
    const answers = await Promise.all(jobs.map((tokens) => generate(core, tokens, { max_tokens: 50 })));
    expect(answers.map(({ tokens }) => tokens)).toEqual(jobs.map((job) => expectedTokens(job, 50)));
    // A prompt is computed once; if it was computed again, there are more rows than tokens.
    expect(backend.runs.filter(({ name }) => name === "step").length).toBeGreaterThan(50);
  });

  test("a second turn starts from the prefix cache", async () => {
    const core = new EngineCore(new FakeBackend(), NO_END);
    const first = prompt(30);
    const { tokens } = await generate(core, first, { max_tokens: 10 });
    const second = [...first, ...tokens, 5, 6, 7];
    const answer = await generate(core, second, { max_tokens: 10 });
    expect(answer.stats.cachedTokens).toBe(36);
    expect(answer.tokens).toEqual(expectedTokens(second, 10));
  });

  test("the same prompt several times is computed once", async () => {
    const core = new EngineCore(new FakeBackend(), NO_END);
    const tokens = prompt(41);
    const answers = await Promise.all([1, 2, 3].map(() => generate(core, tokens, { max_tokens: 4 })));
    expect(answers.map(({ stats }) => stats.cachedTokens)).toEqual([0, 40, 40]);
    for (const answer of answers) expect(answer.tokens).toEqual(expectedTokens(tokens, 4));
  });

  test("a seed gives one text, alone or among others", async () => {
    const core = new EngineCore(new FakeBackend(), NO_END);
    const options = { temperature: 0.8, seed: -7n, max_tokens: 20 };
    const expected = expectedTokens(prompt(9), 20, 97, BigInt.asUintN(64, -7n));
    expect((await generate(core, prompt(9), options)).tokens).toEqual(expected);
    const others = [1, 2, 3].map((i) => generate(core, prompt(20 + i, i), { max_tokens: 30 }));
    expect((await generate(core, prompt(9), options)).tokens).toEqual(expected);
    for (const [i, other] of (await Promise.all(others)).entries())
      expect(other.tokens).toEqual(expectedTokens(prompt(21 + i, i + 1), 30));
  });

  test("the bias of a slot's last request is gone", async () => {
    const core = new EngineCore(new FakeBackend({ slots: 1 }), NO_END);
    const biased = await generate(core, prompt(5), { logit_bias: { 0: 100 }, max_tokens: 3 });
    expect(biased.tokens).toEqual([0, 0, 0]);
    const { tokens } = await generate(core, prompt(5), { temperature: 0.5, seed: 1, max_tokens: 3 });
    expect(tokens).toEqual(expectedTokens(prompt(5), 3, 97, 1n));
  });

  test("what used the device between answers leaves no bias to a later one", async () => {
    const core = new EngineCore(new FakeBackend({ slots: 1 }), NO_END);
    await generate(core, prompt(5), { logit_bias: { 0: 100 }, max_tokens: 3 });
    await core.alone(
      () => undefined,
      async () => undefined,
    );
    const { tokens } = await generate(core, prompt(5), { temperature: 0.5, seed: 1, max_tokens: 3 });
    expect(tokens).toEqual(expectedTokens(prompt(5), 3, 97, 1n));
  });

  test("what used the device between answers may have written over their inputs", async () => {
    const backend = new FakeBackend();
    const core = new EngineCore(backend, NO_END);
    await generate(core, prompt(9), { max_tokens: 3 });
    const use = async (): Promise<void> => {
      backend.write("slots", new Int32Array(16).fill(1));
      backend.write("page_table.0", new Int32Array(8).fill(5));
    };
    await core.alone(() => undefined, use);
    const { tokens } = await generate(core, prompt(9), { max_tokens: 3 });
    expect(tokens).toEqual(expectedTokens(prompt(9), 3));
  });

  test("what may not use the device leaves the prefix cache as it is", async () => {
    const core = new EngineCore(new FakeBackend(), NO_END);
    await generate(core, prompt(41), { max_tokens: 2 });
    const refuse = (): never => {
      throw new RequestError("no");
    };
    await expect(core.alone(refuse, async () => undefined)).rejects.toThrow(RequestError);
    expect((await generate(core, prompt(41), { max_tokens: 2 })).stats.cachedTokens).toBe(40);
    await core.alone(
      () => undefined,
      async () => undefined,
    );
    const answer = await generate(core, prompt(41), { max_tokens: 2 });
    expect(answer.stats.cachedTokens).toBe(0);
    expect(answer.tokens).toEqual(expectedTokens(prompt(41), 2));
  });

  test("an end token ends the answer and is not part of it", async () => {
    const expected = expectedTokens(prompt(6), 30);
    const end = expected[12] ?? 0;
    const core = new EngineCore(new FakeBackend(), [end]);
    const answer = await generate(core, prompt(6), { max_tokens: 30 });
    expect(answer).toMatchObject({ reason: "stop", tokens: expected.slice(0, expected.indexOf(end)) });
    const on = await generate(core, prompt(6), { max_tokens: 30, ignore_eos: true });
    expect(on.tokens).toEqual(expected);
  });

  test("steps run ahead of what has been read, and never past the limit", async () => {
    const backend = new FakeBackend();
    const core = new EngineCore(backend, NO_END);
    await generate(core, prompt(3), { max_tokens: 10 });
    expect(backend.mostInFlight).toBe(3);
    expect(backend.runs.filter(({ name }) => name === "step")).toHaveLength(10);
    await generate(core, prompt(3, 2), { endAfter: 4 });
    expect(backend.runs.filter(({ name }) => name === "step").length).toBeLessThanOrEqual(10 + 4 + 2);
  });

  test("a cancelled request leaves the others alone", async () => {
    const core = new EngineCore(new FakeBackend(), NO_END);
    let cancelled: Request | null = null;
    let seen = 0;
    cancelled = core.submit(prompt(20, 9), parseSampling({ temperature: 0 }, null, 97), {
      token: () => {
        seen += 1;
        if (seen === 3 && cancelled) core.cancel(cancelled);
        return true;
      },
      finish: () => expect.unreachable("a cancelled request does not finish"),
      fail: () => expect.unreachable("a cancelled request does not fail"),
    });
    const { tokens } = await generate(core, prompt(8), { max_tokens: 40 });
    expect(tokens).toEqual(expectedTokens(prompt(8), 40));
    expect(seen).toBe(3);
  });

  test("prefill does not run a bucket more than half empty", async () => {
    const backend = new FakeBackend();
    await generate(new EngineCore(backend, NO_END), prompt(20), { max_tokens: 1 });
    expect(backend.runs.filter(({ name }) => name === "step").map(({ size }) => size)).toEqual([16, 4]);
  });

  test("what cannot fit is refused with the numbers", async () => {
    const core = new EngineCore(new FakeBackend(), NO_END);
    const submit = (tokens: number[]): unknown => generate(core, tokens, {});
    await expect(submit(prompt(128))).rejects.toThrow(/context length is 128 tokens, .* has 128 tokens/);
    await expect(submit([97])).rejects.toThrow(RequestError);
    await expect(submit([])).rejects.toThrow(/empty/);
  });

  test("a function that the device cannot run fails those who need it", async () => {
    const backend = new FakeBackend();
    backend.cannotRun = "sample";
    const core = new EngineCore(backend, NO_END);
    // Both are in one step, and only one of them needs the function.
    const [sampled, plain] = await Promise.allSettled([
      generate(core, prompt(5), { temperature: 1 }),
      generate(core, prompt(5), { max_tokens: 6 }),
    ]);
    expect(sampled).toMatchObject({
      reason: { message: expect.stringContaining("sample does not compile") },
    });
    expect(plain).toMatchObject({ value: { tokens: expectedTokens(prompt(5), 6) } });
  });

  test("a request cancelled while kernels compile leaves the others alone", async () => {
    const core = new EngineCore(new FakeBackend(), NO_END);
    const listener = { token: () => true, finish: () => undefined, fail: () => undefined };
    const cancelled = core.submit(prompt(20, 9), parseSampling({ temperature: 0 }, null, 97), listener);
    const other = generate(core, prompt(8), { max_tokens: 9 });
    await new Promise((resolve) => setTimeout(resolve, 0));
    core.cancel(cancelled);
    expect((await other).tokens).toEqual(expectedTokens(prompt(8), 9));
  });

  test("a lost device fails every request and refuses new ones", async () => {
    const backend = new FakeBackend();
    const core = new EngineCore(backend, NO_END);
    const onToken = (count: number): void => {
      if (count === 5) backend.failure = new DeviceError("lost");
    };
    const both = [generate(core, prompt(5), { onToken }), generate(core, prompt(7), {})];
    for (const result of await Promise.allSettled(both))
      expect(result).toMatchObject({ status: "rejected", reason: expect.any(DeviceError) });
    await expect(generate(core, prompt(5), {})).rejects.toThrow("lost");
  });
});
