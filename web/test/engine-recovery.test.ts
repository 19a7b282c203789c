import { describe, expect, test } from "vitest";
import type { FunctionName } from "../src/artifact/manifest.js";
import { DeviceError, DeviceLostError, OutOfMemoryError } from "../src/protocol/errors.js";
import type { SamplingOptions } from "../src/protocol/openai.js";
import type { HostArray, Read } from "../src/worker/engine/backend.js";
import { EngineCore, type EngineHooks, MOST_LOSSES } from "../src/worker/engine/engine-core.js";
import { parseSampling } from "../src/worker/engine/sampling.js";
import { expectedTokens, FakeBackend } from "./support/fake-backend.js";

const SHAPE = { pageSize: 4, slots: 4, pages: 60, contextLength: 96 };
const COUNT = 8;

/** A device that fails. An engine over such devices must give the answers of a device that does not. */
class Weak extends FakeBackend {
  disposed = false;
  #left: Error | null = null;

  constructor(
    /** Runs until the device is lost. */
    private life: number,
    /** Rows of the largest step for which there is memory when it runs, or when it is compiled. */
    private readonly room: { readonly run?: number; readonly compile?: number } = {},
    shape: Partial<typeof SHAPE> = {},
  ) {
    super({ ...SHAPE, ...shape });
  }

  override async prepare(name: FunctionName, size: number, onKernel?: () => void): Promise<void> {
    if (name === "step" && size > (this.room.compile ?? size))
      throw new OutOfMemoryError(`no memory to compile step.${size}`);
    await super.prepare(name, size, onKernel);
  }

  override run(name: FunctionName, size: number): void {
    this.life -= 1;
    if (this.life < 0) this.#left = new DeviceLostError("the device was lost");
    if (name === "step" && size > (this.room.run ?? size))
      this.#left ??= new OutOfMemoryError(`no memory for step.${size}`);
    if (!this.#left) super.run(name, size);
  }

  override async fetch(reads: readonly Read[]): Promise<HostArray[]> {
    if (this.#left) throw this.#left;
    return super.fetch(reads);
  }

  override dispose(): void {
    this.disposed = true;
    super.dispose();
  }
}

function prompt(length: number, salt = 1): number[] {
  return Array.from({ length }, (_, i) => (Math.imul(i + 1, 2654435761 + salt * 40503) >>> 7) % 97);
}

function generate(
  core: EngineCore,
  tokens: number[],
  options: SamplingOptions = {},
  heard: (token: number) => void = () => undefined,
): Promise<number[]> {
  return new Promise((resolve, reject) => {
    const answer: number[] = [];
    core.submit(tokens, parseSampling({ temperature: 0, max_tokens: COUNT, ...options }, null, 97), {
      token: (token) => {
        heard(token);
        return answer.push(token) > 0;
      },
      finish: () => resolve(answer),
      fail: reject,
    });
  });
}

const JOBS = [
  { tokens: prompt(41), seed: undefined },
  { tokens: [...prompt(41).slice(0, 30), ...prompt(9, 3)], seed: undefined },
  { tokens: prompt(70, 2), seed: undefined },
  { tokens: prompt(7, 5), seed: 11n },
  { tokens: prompt(23, 6), seed: undefined },
];
const EXPECTED = JOBS.map(({ tokens, seed }) => expectedTokens(tokens, COUNT, 97, seed));

function run(core: EngineCore): Promise<number[][]> {
  return Promise.all(
    JOBS.map(({ tokens, seed }) =>
      generate(core, tokens, seed === undefined ? {} : { temperature: 0.7, seed }),
    ),
  );
}

/** An engine that opens these devices one after the other. */
function engine(
  devices: readonly (Weak | Error)[],
  hooks: EngineHooks = {},
): { readonly core: EngineCore; readonly opened: Weak[] } {
  const opened: Weak[] = [];
  const left = [...devices];
  const open = (): Weak => {
    const next = left.shift() ?? new Weak(Number.POSITIVE_INFINITY);
    opened.at(-1)?.dispose();
    if (next instanceof Error) throw next;
    opened.push(next);
    return next;
  };
  const core = new EngineCore(open(), [], { reopen: async () => open(), ...hooks });
  return { core, opened };
}

describe("a device that is lost", () => {
  test.each([[[0]], [[1]], [[4]], [[9, 2]], [[7, 0, 3]]])("is opened again, runs %j", async (lives) => {
    const onLost = (error: DeviceError): never => {
      throw error;
    };
    const { core, opened } = engine(
      lives.map((life) => new Weak(life)),
      { onLost },
    );
    expect(await run(core)).toEqual(EXPECTED);
    expect(opened).toHaveLength(lives.length + 1);
    expect(opened.map(({ disposed }) => disposed)).toEqual([...lives.map(() => true), false]);
    expect(await run(core)).toEqual(EXPECTED);
    expect(core.freeTokens).toBeGreaterThan(0);
  });

  test("again and again fails the requests, and the next one has it opened once more", async () => {
    const lost: DeviceError[] = [];
    const onLost = (error: DeviceError): number => lost.push(error);
    const { core } = engine(
      Array.from({ length: MOST_LOSSES + 1 }, () => new Weak(0)),
      { onLost },
    );
    await expect(generate(core, prompt(9))).rejects.toBeInstanceOf(DeviceLostError);
    expect(lost.map(({ code }) => code)).toEqual(["device-lost"]);
    expect(await run(core)).toEqual(EXPECTED);
  });

  test("and cannot be opened again is an error, and the next request tries again", async () => {
    const none = new DeviceError("The browser offers no GPU adapter.", { code: "no-adapter" });
    const lost: DeviceError[] = [];
    const { core } = engine([new Weak(3), none], { onLost: (error) => lost.push(error) });
    await expect(generate(core, prompt(30))).rejects.toThrow("no GPU adapter");
    expect(lost).toEqual([none]);
    expect(await run(core)).toEqual(EXPECTED);
  });

  test.each([new DeviceLostError("the device was lost"), new OutOfMemoryError("no memory")])(
    "between answers is opened again for the next one: $message",
    async (failure) => {
      const { core, opened } = engine([new Weak(Number.POSITIVE_INFINITY)]);
      const use = async (): Promise<void> => {
        for (const device of opened) device.failure = failure;
        throw failure;
      };
      await expect(core.alone(() => undefined, use)).rejects.toBe(failure);
      expect(await run(core)).toEqual(EXPECTED);
      expect(opened).toHaveLength(2);
      expect(core.largestStep).toBe(256);
    },
  );

  test("does not keep who gave up waiting: a request that was cancelled meanwhile stays away", async () => {
    let open: (device: Weak) => void = () => undefined;
    const reopen = (): Promise<Weak> =>
      new Promise((resolve) => {
        open = resolve;
      });
    const core = new EngineCore(new Weak(0), [], { reopen });
    const told: string[] = [];
    const request = core.submit(prompt(9), parseSampling({ temperature: 0, max_tokens: 4 }, null, 97), {
      token: () => true,
      finish: () => told.push("finish"),
      fail: () => told.push("fail"),
    });
    await expect.poll(() => open.length, { timeout: 20_000 }).toBe(1);
    core.cancel(request);
    const other = generate(core, prompt(12));
    open(new Weak(1000));
    expect(await other).toEqual(expectedTokens(prompt(12), COUNT, 97));
    expect(told).toEqual([]);
  });

  test("and has less room then says so, and ends what does not fit by name", async () => {
    const warnings: string[] = [];
    const small = new Weak(Number.POSITIVE_INFINITY, {}, { contextLength: 32, pages: 40 });
    const { core } = engine([new Weak(2), small], { onWarning: (message) => warnings.push(message) });
    const long = generate(core, prompt(41));
    const told = expect(long).rejects.toThrow("a context of 32 tokens instead of 96. This request has 4");
    const [short, ended] = await Promise.all([
      generate(core, prompt(9)),
      generate(core, prompt(28, 3), { max_tokens: null }),
      told,
    ]);
    expect(short).toEqual(expectedTokens(prompt(9), COUNT, 97));
    expect(ended, "up to the end of the context").toEqual(expectedTokens(prompt(28, 3), 4, 97));
    expect(warnings).toEqual([expect.stringContaining("the context is 32 tokens instead of 96")]);
    expect(() => core.submit(prompt(40), parseSampling({}, null, 97), NOBODY)).toThrow(
      "maximum context length is 32 tokens",
    );
    expect(core.freeTokens).toBeGreaterThan(0);
  });

  test("ends the engine where there is no way to open it again", async () => {
    const core = new EngineCore(new Weak(2), []);
    await expect(generate(core, prompt(30))).rejects.toBeInstanceOf(DeviceLostError);
    expect(() => core.submit(prompt(3), parseSampling({}, null, 97), NOBODY)).toThrow(DeviceLostError);
  });
});

const NOBODY = { token: () => true, finish: () => undefined, fail: () => undefined };

describe("a step that there is no memory for", () => {
  test.each([16, 4, 1])("becomes steps of %d rows, and no answer changes", async (rows) => {
    const warnings: string[] = [];
    const narrow = (): Weak => new Weak(Number.POSITIVE_INFINITY, { run: rows });
    const { core, opened } = engine([narrow(), narrow(), narrow(), narrow(), narrow()], {
      onWarning: (message) => warnings.push(message),
    });
    expect(core.largestStep).toBe(256);
    expect(await run(core)).toEqual(EXPECTED);
    expect(core.largestStep).toBe(rows);
    expect(opened).toHaveLength(warnings.length + 1);
    expect(warnings.at(-1)).toContain(`steps of at most ${rows} rows`);
    const told = warnings.length;
    expect(await run(core)).toEqual(EXPECTED);
    expect(warnings).toHaveLength(told);
  });

  test("as its kernels are compiled leaves the device as it is", async () => {
    const warnings: string[] = [];
    const { core, opened } = engine([new Weak(Number.POSITIVE_INFINITY, { compile: 4 })], {
      onWarning: (message) => warnings.push(message),
    });
    expect(await run(core)).toEqual(EXPECTED);
    expect(core.largestStep).toBe(4);
    expect(opened).toHaveLength(1);
    expect(warnings.at(-1)).toContain("steps of at most 4 rows");
  });

  test("however small fails its requests", async () => {
    const { core } = engine(Array.from({ length: 5 }, () => new Weak(Number.POSITIVE_INFINITY, { run: 0 })));
    await expect(generate(core, prompt(70))).rejects.toThrow("no memory for step.1");
    expect(core.largestStep).toBe(1);
  });
});

describe("kernels that a request waits for", () => {
  test("are told of, and others need not wait longer than for one of them", async () => {
    const told: [number, number][] = [];
    const { core } = engine([], { onCompiling: (compiled, total) => told.push([compiled, total]) });
    expect(await run(core)).toEqual(EXPECTED);
    expect(told[0]?.[0]).toBe(0);
    for (const [compiled, total] of told) expect(compiled).toBeLessThanOrEqual(total);
    const [compiled, total] = told.at(-1) ?? [];
    expect(compiled).toBe(total);
    told.length = 0;
    expect(await run(core)).toEqual(EXPECTED);
    expect(told).toEqual([]);
  });
});

describe("a prompt that takes more than a step", () => {
  test("is told of while it is read, and is read when its first token comes", async () => {
    const told: [number, number][] = [];
    const { core } = engine([], { onReading: (read, total) => told.push([read, total]) });
    const tokens = prompt(70);
    const seen: number[] = [];
    const expected = await generate(core, tokens, {}, () => seen.push(told.length));
    expect(told.length).toBeGreaterThan(1);
    expect(told.at(-1)).toEqual([70, 70]);
    for (const [read, total] of told.slice(0, -1)) {
      expect(total).toBe(70);
      expect(read).toBeLessThan(70);
    }
    expect(seen[0]).toBe(told.length);
    told.length = 0;
    expect(await generate(core, tokens)).toEqual(expected); // the rest of the prompt takes a step
    expect(told).toEqual([]);
  });
});
