import { describe, expect, test } from "vitest";
import type * as nearfar from "../../src/page/index.js";
import { CHROMIUM } from "../support/chromium.js";
import { enginePage } from "../support/engine-page.js";
import { expectedText, toyArtifact } from "../support/toy-artifact.js";

describe.skipIf(!CHROMIUM)("the engine in Chromium", { timeout: 180_000 }, () => {
  const at = enginePage();

  test("fails the request alone that needs a kernel which is not valid, and says where", async () => {
    at.artifact = toyArtifact({ invalid: "score" });
    const told = await at.page.evaluate(async () => {
      const engine = await nearfarPackage.createEngine("/toy/");
      const asked = { prompt: "q", max_tokens: 100, temperature: 0 };
      const plain = engine.completions.create(asked);
      const scored = engine.completions
        .create({ ...asked, logprobs: 1 })
        .catch((error: Error) => error.message);
      const told = { scored: await scored, plain: (await plain).choices[0]?.text };
      const { reopened } = await engine.stats();
      await engine.dispose();
      return { ...told, reopened };
    });
    expect(told).toEqual({
      scored: expect.stringMatching(/kernel score_\d+ does not compile on this GPU: \d+:\d+ /),
      plain: expectedText("q", 100),
      reopened: 0,
    });
  });

  test("answers as the model does, several at once, and frees every buffer", async () => {
    const prompts = ["", "H", "Hello, world", "x".repeat(100), "Hello, world!"];
    const result = await at.page.evaluate(async (texts) => {
      const progress: nearfar.LoadProgress[] = [];
      const engine = await nearfarPackage.createEngine("/toy/", {
        onProgress: (event) => progress.push(event),
      });
      const answers = await Promise.all(
        texts.map((prompt) => engine.completions.create({ prompt, max_tokens: 50, temperature: 0 })),
      );
      const stats = await engine.stats();
      await engine.dispose();
      return { answers, progress, stats, after: await engine.stats(), model: engine.model };
    }, prompts);
    expect(result.answers.map(({ choices }) => choices[0]?.text)).toEqual(
      prompts.map((text) => expectedText(text, 50)),
    );
    expect(result.answers[2]?.usage).toMatchObject({
      prompt_tokens: 12,
      completion_tokens: 50,
      total_tokens: 62,
    });
    expect(result.model).toMatchObject({
      name: "toy",
      program: "f32",
      precision: "f32",
      contextLength: 256,
      vocabSize: 97,
    });
    expect(result.stats).toMatchObject({ launchesPerToken: 3, last: { completionTokens: 50 } });
    expect(result.stats.gpuBuffers).toBeGreaterThan(10);
    expect(result.after).toMatchObject({ gpuBuffers: 0, gpuBytes: 0 });
    expect(result.progress.map(({ phase }) => phase)).toContain("weights");
    const kernels = result.progress.flatMap((event) => (event.phase === "kernels" ? [event] : []));
    expect(kernels[0]?.total).toBeGreaterThan(0);
    expect(kernels.at(-1)?.compiled).toBe(kernels.at(-1)?.total);
    const reading = result.progress.flatMap((event) => (event.phase === "prompt" ? [event] : []));
    expect(reading.at(-1)).toMatchObject({ read: reading.at(-1)?.total });
    const loading = result.progress.filter(({ phase }) => phase !== "kernels" && phase !== "prompt");
    expect(loading.at(-1)).toEqual({ phase: "ready", fraction: 1 });
    const fractions = result.progress.map(({ fraction }) => fraction ?? 1);
    expect(fractions).toEqual([...fractions].sort((a, b) => a - b));
  });

  test("goes on from token ids as from their text, and refuses one that the model lacks", async () => {
    const result = await at.page.evaluate(async () => {
      const engine = await nearfarPackage.createEngine("/toy/");
      const ask = (prompt: number[]): Promise<nearfar.Completion> =>
        engine.completions.create({ prompt, max_tokens: 9, temperature: 0 });
      const { choices, usage } = await ask([66, 67, 68]);
      const refused: { param?: string } = await ask([66, 97]).catch((error) => error);
      await engine.dispose();
      return { text: choices[0]?.text, tokens: usage.prompt_tokens, param: refused.param };
    });
    expect(result).toEqual({ text: expectedText("abc", 9), tokens: 3, param: "prompt" });
  });

  test("streams, and stops at a stop string, at an abort, and when the loop is left", async () => {
    const full = expectedText("abc", 60);
    const stop = full.slice(20, 23);
    const result = await at.page.evaluate(async (stopString) => {
      const engine = await nearfarPackage.createEngine("/toy/");
      const request = { prompt: "abc", max_tokens: 60, temperature: 0, stream: true } as const;
      let streamed = "";
      let reason: string | null = null;
      for await (const { choices } of await engine.completions.create({ ...request, stop: stopString })) {
        streamed += choices[0]?.text ?? "";
        reason = choices[0]?.finish_reason ?? reason;
      }
      const controller = new AbortController();
      let aborted = "";
      try {
        for await (const chunk of await engine.completions.create({
          ...request,
          signal: controller.signal,
        })) {
          if (chunk.choices[0]?.text) controller.abort();
        }
      } catch (error) {
        aborted = (error as Error).name;
      }
      for await (const _ of await engine.completions.create(request)) break;
      const again = await engine.completions.create({ ...request, stream: false });
      await engine.dispose();
      return { streamed, reason, aborted, again: again.choices[0]?.text };
    }, stop);
    expect(result).toEqual({
      streamed: full.slice(0, full.indexOf(stop)),
      reason: "stop",
      aborted: "AbortError",
      again: full,
    });
  });

  test("tells what each launch costs while it is idle, and forgets what that did to the cache", async () => {
    const result = await at.page.evaluate(async () => {
      const engine = await nearfarPackage.createEngine("/toy/");
      const request = { prompt: "Hello, world", max_tokens: 20, temperature: 0 } as const;
      const before = await engine.completions.create(request);
      const profile = await engine.profile({ context: 100, rounds: 3 });
      const prefill = await engine.profile({ rows: 16 });
      const after = await engine.completions.create(request);
      const busy = engine.completions.create(request);
      const refused = await engine.profile().catch((error: Error) => `${error.name}: ${error.message}`);
      await busy;
      const odd = await engine
        .profile({ rows: 5 })
        .catch((error: Error) => `${error.name}: ${error.message}`);
      await engine.dispose();
      return {
        profile,
        prefill,
        texts: [before.choices[0]?.text, after.choices[0]?.text],
        refused,
        odd,
      };
    });
    const { profile, prefill, texts } = result;
    expect(profile).toMatchObject({ program: "f32", rows: 1, context: 100, rounds: 3 });
    expect(profile.stepMilliseconds).toBeGreaterThan(0);
    expect(profile.launches.map(({ kernel }) => kernel)).toEqual(["append_1", "look_1"]);
    expect(profile.launches.map(({ weightBytes }) => weightBytes)).toEqual([0, 1200]);
    const shares = profile.launches.reduce((sum, { share }) => sum + share, 0);
    const spent = profile.launches.reduce((sum, { milliseconds }) => sum + milliseconds, 0);
    expect(shares).toBeCloseTo(spent > 0 ? 1 : 0);
    expect(prefill).toMatchObject({ rows: 16, context: 256 });
    expect(texts).toEqual([expectedText("Hello, world", 20), expectedText("Hello, world", 20)]);
    expect(result.refused).toMatch(/^RequestError: The engine is answering/);
    expect(result.odd).toMatch(/^RequestError: rows must be one of 1, 4, 16, 64, not 5/);
  });

  test("says by name that a browser does not tell what a launch costs", async () => {
    const worker = new URL("dist/worker.js", at.server.url).href;
    const result = await at.page.evaluate(async (url) => {
      const code = `import "${url}";
        const request = GPUAdapter.prototype.requestDevice;
        GPUAdapter.prototype.requestDevice = function (wanted) {
          return request.call(this, { ...wanted, requiredFeatures: [] });
        };`;
      const blob = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
      const engine = await nearfarPackage.createEngine("/toy/", {
        worker: () => new Worker(blob, { type: "module" }),
      });
      const refused = await engine.profile().catch((error: Error) => `${error.name}: ${error.message}`);
      const { choices } = await engine.completions.create({ prompt: "q", max_tokens: 9, temperature: 0 });
      await engine.dispose();
      return [refused, choices[0]?.text];
    }, worker);
    expect(result).toEqual([
      expect.stringMatching(/^DeviceError: This browser cannot time launches/),
      expectedText("q", 9),
    ]);
  });

  test("refuses a cache that cannot be, with the numbers", async () => {
    const attempt = (options: nearfar.EngineOptions): Promise<string> =>
      at.page.evaluate(async (given) => {
        try {
          const engine = await nearfarPackage.createEngine("/toy/", given);
          const { contextLength } = engine.model;
          await engine.dispose();
          return `context ${contextLength}`;
        } catch (error) {
          return String(error);
        }
      }, options);
    expect(await attempt({ contextLength: 257 })).toMatch(
      /RequestError: contextLength is 257; this model takes 1 to 256/,
    );
    expect(await attempt({ kvMemory: 127 })).toMatch(/DeviceError: .*4 tokens needs 128 bytes/);
    expect(await attempt({ kvMemory: 1280, contextLength: 41 })).toMatch(/DeviceError: .*room for 40 tokens/);
    expect(await attempt({ kvMemory: 1280 })).toBe("context 40");
  });

  test("an abort after loading is none of the engine's business", async () => {
    const text = await at.page.evaluate(async () => {
      const controller = new AbortController();
      const engine = await nearfarPackage.createEngine("/toy/", { signal: controller.signal });
      controller.abort();
      const { choices } = await engine.completions.create({ prompt: "z", max_tokens: 5, temperature: 0 });
      await engine.dispose();
      return choices[0]?.text;
    });
    expect(text).toBe(expectedText("z", 5));
  });

  test("fails what runs when it is disposed", async () => {
    const names = await at.page.evaluate(async () => {
      const engine = await nearfarPackage.createEngine("/toy/");
      const running = engine.completions.create({ prompt: "x", temperature: 0, max_tokens: 200 });
      const failed = running.catch((error: Error) => error.name);
      await engine.dispose();
      const late = engine.completions.create({ prompt: "x" }).catch((error: Error) => error.name);
      return [await failed, await late];
    });
    expect(names).toEqual(["DeviceError", "DeviceError"]);
  });
});
