import type { Browser, Page } from "playwright-core";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "vitest";
import type * as nearfar from "../../src/page/index.js";
import { CHROMIUM, openChromium } from "../support/chromium.js";
import { builtPackage, distFile, type StaticServer, serve } from "../support/serve.js";
import { expectedText, toyArtifact } from "../support/toy-artifact.js";

/** What the test's page has: the package, as an app imports it. */
declare global {
  var nearfarPackage: typeof nearfar;
}

describe.skipIf(!CHROMIUM)("the engine in Chromium", { timeout: 60_000 }, () => {
  let browser: Browser;
  let server: StaticServer;
  let page: Page;
  let artifact = toyArtifact();

  beforeAll(async () => {
    await builtPackage();
    browser = await openChromium();
  }, 60_000);
  afterAll(() => browser?.close());

  beforeEach(async () => {
    artifact = toyArtifact();
    server = await serve(
      async (path) => artifact.files.get(path.replace(/^toy\//, "")) ?? (await distFile(path)),
    );
    const context = await browser.newContext();
    page = await context.newPage();
    await page.goto(server.url.href);
    await importPackage(new URL("dist/index.js", server.url));
  });

  /**
   * By a script of the page itself: the test runner rewrites imports in functions that are sent to the page.
   */
  async function importPackage(url: URL): Promise<void> {
    const content = `import * as nearfar from "${url}"; globalThis.nearfarPackage = nearfar;`;
    await page.evaluate(() => Reflect.deleteProperty(globalThis, "nearfarPackage"));
    await page.addScriptTag({ type: "module", content });
    await page.waitForFunction(() => "nearfarPackage" in globalThis);
  }

  afterEach(async () => {
    await page.context().close();
    server.close();
  });

  test("answers as the model does, several at once, and frees every buffer", async () => {
    const prompts = ["", "H", "Hello, world", "x".repeat(100), "Hello, world!"];
    const result = await page.evaluate(async (texts) => {
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
    expect(result.progress.filter(({ phase }) => phase !== "kernels").at(-1)).toEqual({
      phase: "ready",
      fraction: 1,
    });
    const fractions = result.progress.map(({ fraction }) => fraction ?? 1);
    expect(fractions).toEqual([...fractions].sort((a, b) => a - b));
  });

  test("streams, and stops at a stop string, at an abort, and when the loop is left", async () => {
    const full = expectedText("abc", 60);
    const stop = full.slice(20, 23);
    const result = await page.evaluate(async (stopString) => {
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
    const result = await page.evaluate(async () => {
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
    const worker = new URL("dist/worker.js", server.url).href;
    const result = await page.evaluate(async (url) => {
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
      expect.stringMatching(/^DeviceError: This browser does not tell what a launch takes/),
      expectedText("q", 9),
    ]);
  });

  test("opens a device that is lost anew: the answer goes on, and so do later ones", async () => {
    const worker = new URL("dist/worker.js", server.url).href;
    const result = await page.evaluate(async (url) => {
      // The device is the worker's own: it is taken away from inside.
      const code = `import "${url}";
        let device;
        const request = GPUAdapter.prototype.requestDevice;
        GPUAdapter.prototype.requestDevice = async function (...given) {
          return (device = await request.apply(this, given));
        };
        addEventListener("message", ({ data }) => { if (data === "lose") device.destroy(); });`;
      let inside: Worker | null = null;
      const phases: string[] = [];
      const engine = await nearfarPackage.createEngine("/toy/", {
        onProgress: ({ phase }) => phases.push(phase),
        worker: () => {
          const blob = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
          inside = new Worker(blob, { type: "module" });
          return inside;
        },
      });
      const lose = (): void => inside?.postMessage("lose");
      const request = { prompt: "abc", max_tokens: 60, temperature: 0 } as const;
      let streamed = "";
      for await (const { choices } of await engine.completions.create({ ...request, stream: true })) {
        if (streamed === "") lose();
        streamed += choices[0]?.text ?? "";
      }
      lose();
      const [one, other] = await Promise.all([
        engine.completions.create(request),
        engine.completions.create({ ...request, prompt: "x".repeat(80) }),
      ]);
      const stats = await engine.stats();
      lose();
      const profile = await engine.profile().catch((error: Error) => String(error));
      const last = await engine.completions.create(request);
      await engine.dispose();
      return {
        streamed,
        profile,
        after: [one, other, last].map(({ choices }) => choices[0]?.text),
        held: [stats.gpuBuffers > 10, (await engine.stats()).gpuBuffers],
        largestStep: stats.largestStep,
        reopened: stats.reopened,
        phases: phases.slice(phases.indexOf("ready") + 1),
      };
    }, worker);
    expect(result).toEqual({
      streamed: expectedText("abc", 60),
      profile: expect.stringMatching(/^DeviceError: The GPU device was lost/),
      after: [expectedText("abc", 60), expectedText("x".repeat(80), 60), expectedText("abc", 60)],
      held: [true, 0],
      largestStep: 64,
      reopened: 2,
      phases: expect.arrayContaining(["reopening", "weights", "kernels", "reopened"]),
    });
    const { phases } = result;
    expect(phases.filter((phase) => phase === "reopening" || phase === "reopened")).toEqual([
      ...["reopening", "reopened"],
      ...["reopening", "reopened"],
      ...["reopening", "reopened"],
    ]);
    const weights = (path: string): boolean => path.includes("weights/");
    expect(server.requests.filter(weights), "from the cache of shards").toHaveLength(3);
  });

  /** Two answers of a worker whose WebGPU is changed by `code`: each one's text as it came, and its error. */
  async function withPatch(code: string, prompt: string): Promise<{ text: string; error: string }[]> {
    const worker = new URL("dist/worker.js", server.url).href;
    return page.evaluate(
      async ([source, content]) => {
        const blob = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
        const engine = await nearfarPackage.createEngine("/toy/", {
          worker: () => new Worker(blob, { type: "module" }),
        });
        const request = { prompt: content, max_tokens: 40, temperature: 0, stream: true } as const;
        const answers = [
          { text: "", error: "" },
          { text: "", error: "" },
        ];
        for (const answer of answers) {
          try {
            for await (const { choices } of await engine.completions.create(request))
              answer.text += choices[0]?.text ?? "";
          } catch (error) {
            answer.error = String(error);
          }
        }
        await engine.dispose();
        return answers;
      },
      [`import "${worker}";\n${code}`, prompt] as const,
    );
  }

  test("believes no result of a step that the GPU refused", async () => {
    // Of the submits of an answer one is dropped, as WebGPU does with commands that it has no memory for.
    const [refused, next] = await withPatch(
      `let device, left = 20;
      const request = GPUAdapter.prototype.requestDevice;
      GPUAdapter.prototype.requestDevice = async function (...given) {
        return (device = await request.apply(this, given));
      };
      const submit = GPUQueue.prototype.submit;
      GPUQueue.prototype.submit = function (commands) {
        if (--left !== 0) return submit.call(this, commands);
        const error = new GPUOutOfMemoryError("no room for it");
        device.dispatchEvent(new GPUUncapturedErrorEvent("uncapturederror", { error }));
      };`,
      "Hello, world",
    );
    const expected = expectedText("Hello, world", 40);
    expect(refused?.error).toMatch(/^DeviceError: The GPU ran out of memory .*no room for it/);
    expect(refused?.text.length).toBeGreaterThan(1);
    expect(refused?.text).toBe(expected.slice(0, refused?.text.length));
    expect(next).toEqual({ text: expected, error: "" });
  });

  test("goes on with less room where a device that is opened anew has no more, and says so", async () => {
    const worker = new URL("dist/worker.js", server.url).href;
    const result = await page.evaluate(async (url) => {
      // From the second device on a cache has room for 1/8 of the pages.
      const code = `import "${url}";
        let device, opened = 0, whole = 0, isFull = false;
        const request = GPUAdapter.prototype.requestDevice;
        GPUAdapter.prototype.requestDevice = async function (...given) {
          opened += 1;
          return (device = await request.apply(this, given));
        };
        const create = GPUDevice.prototype.createBuffer;
        GPUDevice.prototype.createBuffer = function (given) {
          if (given.label === "kv.0.k") {
            if (opened === 1) whole = given.size;
            else isFull = given.size > whole / 8;
          }
          return create.call(this, given);
        };
        const pop = GPUDevice.prototype.popErrorScope;
        GPUDevice.prototype.popErrorScope = async function () {
          const error = await pop.call(this);
          if (!isFull) return error;
          isFull = false;
          return new GPUOutOfMemoryError("no room for it");
        };
        addEventListener("message", ({ data }) => { if (data === "lose") device.destroy(); });`;
      let inside: Worker | null = null;
      const told: { phase: string; contextLength?: number }[] = [];
      const warnings: string[] = [];
      const engine = await nearfarPackage.createEngine("/toy/", {
        onProgress: (progress) => told.push(progress),
        onWarning: (message) => warnings.push(message),
        worker: () => {
          const blob = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
          inside = new Worker(blob, { type: "module" });
          return inside;
        },
      });
      const lose = (): void => (inside as Worker | null)?.postMessage("lose");
      const whole = engine.model.contextLength;
      const request = { max_tokens: 12, temperature: 0 } as const;
      lose();
      const [short, long] = await Promise.allSettled([
        engine.completions.create({ ...request, prompt: "abc" }),
        engine.completions.create({ ...request, prompt: "x".repeat(whole - 13) }),
      ]);
      const { contextLength } = await engine.stats();
      const reopened = told.find(({ phase }) => phase === "reopened")?.contextLength;
      const model = engine.model.contextLength;
      await engine.dispose();
      return {
        isShorter: contextLength < whole,
        same: [model, reopened].map((length) => length === contextLength),
        short: short.status === "fulfilled" ? short.value.choices[0]?.text : String(short.reason),
        long: long.status === "rejected" ? String(long.reason) : "no error",
        warnings,
      };
    }, worker);
    expect(result).toEqual({
      isShorter: true,
      same: [true, true],
      short: expectedText("abc", 12),
      long: expect.stringMatching(/^DeviceError: The device was opened anew and has less room/),
      warnings: [expect.stringContaining("from now on the context is")],
    });
  });

  test("opens a device anew that is lost while an answer waits for kernels", async () => {
    const answers = await withPatch(
      `let lost = false;
      const compile = GPUDevice.prototype.createComputePipelineAsync;
      GPUDevice.prototype.createComputePipelineAsync = async function (descriptor) {
        if (lost || descriptor.label !== "look_16") return compile.call(this, descriptor);
        lost = true;
        this.destroy();
        throw new GPUPipelineError("the instance is gone", { reason: "internal" });
      };`,
      "Hello, world",
    );
    const answer = { text: expectedText("Hello, world", 40), error: "" };
    expect(answers).toEqual([answer, answer]);
  });

  test("keeps verified shards; a corrupt one is downloaded again", async () => {
    const load = (): Promise<string[]> =>
      page.evaluate(async () => {
        const warnings: string[] = [];
        const engine = await nearfarPackage.createEngine("/toy/", {
          onWarning: (message) => warnings.push(message),
        });
        const { choices } = await engine.completions.create({ prompt: "q", max_tokens: 9, temperature: 0 });
        await engine.dispose();
        return [choices[0]?.text ?? "", ...warnings];
      });
    const shards = (): number => server.requests.filter((path) => path.includes("weights/")).length;
    const text = expectedText("q", 9);
    expect(await load()).toEqual([text]);
    expect(shards()).toBe(3);
    expect(await load()).toEqual([text]);
    expect(shards()).toBe(3);
    await page.evaluate(async () => {
      const root = await navigator.storage.getDirectory();
      const directory = await root.getDirectoryHandle("nearfar-files");
      for await (const handle of directory.values()) {
        const writable = await (handle as FileSystemFileHandle).createWritable({ keepExistingData: true });
        await writable.write({ type: "write", position: 1, data: new Uint8Array([99]) });
        await writable.close();
      }
    });
    const corrupt = expect.stringMatching(/cached copy of weights.* is corrupt/);
    expect(await load()).toEqual([text, corrupt, corrupt, corrupt]);
    expect(shards()).toBe(6);
  });

  test("says what is wrong with an artifact, a device, a request", async () => {
    const attempt = (): Promise<{ name: string; message: string }> =>
      page.evaluate(async () => {
        try {
          const engine = await nearfarPackage.createEngine("/toy/");
          await engine.dispose();
          return { name: "none", message: "" };
        } catch (error) {
          const { ArtifactError, DeviceError } = nearfarPackage;
          const known = error instanceof ArtifactError || error instanceof DeviceError;
          return { name: known ? error.name : "unknown", message: String(error) };
        }
      });
    server.intercept = (path, response) =>
      path.endsWith("00001.bin") && Boolean(response.end(new Uint8Array(512)));
    expect(await attempt()).toEqual({
      name: "ArtifactError",
      message: expect.stringMatching(/00001\.bin.*corrupt/),
    });
    server.intercept = () => false;
    artifact.files.delete("weights/00002.bin");
    expect(await attempt()).toEqual({
      name: "ArtifactError",
      message: expect.stringMatching(/00002\.bin.*HTTP 404/),
    });
    artifact = toyArtifact();
    // What a CDN does that still has the plan of an earlier build.
    const stale = new TextEncoder().encode(
      `${new TextDecoder().decode(artifact.files.get("plans/f32/step.1.json"))} `,
    );
    artifact.files.set("plans/f32/step.1.json", stale);
    // Good copies are kept from the loads before.
    await page.evaluate(async () => {
      const root = await navigator.storage.getDirectory();
      await root.removeEntry("nearfar-files", { recursive: true });
    });
    expect(await attempt()).toEqual({
      name: "ArtifactError",
      message: expect.stringMatching(/step\.1\.json is corrupt/),
    });
    artifact = toyArtifact();
    const edited = new TextDecoder()
      .decode(artifact.files.get("manifest.json"))
      .replace('"scale": 1', '"scale": 2');
    artifact.files.set("manifest.json", new TextEncoder().encode(edited));
    expect(await attempt()).toEqual({
      name: "ArtifactError",
      message: expect.stringMatching(/not as the build wrote/),
    });
    artifact = toyArtifact({ features: ["shader-f16"] });
    expect(await attempt()).toEqual({
      name: "DeviceError",
      message: expect.stringMatching(/f32: shader-f16/),
    });
    artifact = toyArtifact();
    artifact.files.delete("manifest.json");
    expect(await attempt()).toEqual({
      name: "ArtifactError",
      message: expect.stringMatching(/manifest\.json.*404/),
    });

    artifact = toyArtifact();
    const refused = await page.evaluate(async () => {
      const engine = await nearfarPackage.createEngine("/toy/");
      const params: (string | null)[] = [];
      const options = [
        { temperature: -1 },
        { top_p: 0 },
        { n: 0 },
        { prompt: "x".repeat(256) },
        { logprobs: 21 },
        {},
      ];
      for (const option of options) {
        try {
          await engine.completions.create({ prompt: "x", temperature: 0, max_tokens: 1, ...option });
          params.push("none");
        } catch (error) {
          params.push(error instanceof nearfarPackage.RequestError ? error.param : String(error));
        }
      }
      await engine.dispose();
      return params;
    });
    expect(refused).toEqual(["temperature", "top_p", "n", "messages", "top_logprobs", "none"]);
  });

  test("refuses a cache that cannot be, with the numbers", async () => {
    const attempt = (options: nearfar.EngineOptions): Promise<string> =>
      page.evaluate(async (given) => {
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

  test("works from another origin, as from a CDN", async () => {
    const cdn = await serve(distFile);
    try {
      await importPackage(new URL("dist/index.js", cdn.url));
      const text = await page.evaluate(async () => {
        const engine = await nearfarPackage.createEngine("/toy/");
        const { choices } = await engine.completions.create({ prompt: "z", max_tokens: 5, temperature: 0 });
        await engine.dispose();
        return choices[0]?.text;
      });
      expect(text).toBe(expectedText("z", 5));
    } finally {
      cdn.close();
    }
  });

  test("fails requests with a DeviceError when the GPU is lost for good", async () => {
    // A worker that loses its device while the answer is under way, and then finds no other.
    const patch = `
      const original = GPUAdapter.prototype.requestDevice;
      GPUAdapter.prototype.requestDevice = async function (descriptor) {
        const device = await original.call(this, descriptor);
        GPU.prototype.requestAdapter = async () => null;
        setTimeout(() => device.destroy(), 1500);
        return device;
      };`;
    server.intercept = (path, response) => {
      if (path !== "patch.js") return false;
      response.writeHead(200, { "content-type": "text/javascript" }).end(patch);
      return true;
    };
    const failed = page.evaluate(async () => {
      const imports = ["patch.js", "dist/worker.js"].map(
        (path) => `import "${new URL(path, location.href)}";`,
      );
      const blob = URL.createObjectURL(new Blob(imports, { type: "text/javascript" }));
      const worker = (): Worker => new Worker(blob, { type: "module" });
      const engine = await nearfarPackage.createEngine("/toy/", { worker });
      const failures: string[] = [];
      while (failures.length < 2) {
        const request = { prompt: "x", temperature: 0, max_tokens: 50 };
        await engine.completions.create(request).catch((error: Error) => failures.push(String(error)));
      }
      return { failures, lost: (await engine.lost).code };
    });
    const lost = expect.stringMatching(/DeviceError: The browser has WebGPU, but offers no GPU/);
    expect(await failed).toEqual({ failures: [lost, lost], lost: "no-adapter" });
  });

  test("aborts while loading", async () => {
    server.intercept = (path) => path.endsWith("00001.bin");
    const result = await page.evaluate(async () => {
      const controller = new AbortController();
      setTimeout(() => controller.abort(), 300);
      const started = performance.now();
      try {
        await nearfarPackage.createEngine("/toy/", { signal: controller.signal });
        return { name: "none", took: 0 };
      } catch (error) {
        return { name: (error as Error).name, took: performance.now() - started };
      }
    });
    expect(result.name).toBe("AbortError");
    expect(result.took).toBeLessThan(1900);
  });

  test("an abort after loading is none of the engine's business", async () => {
    const text = await page.evaluate(async () => {
      const controller = new AbortController();
      const engine = await nearfarPackage.createEngine("/toy/", { signal: controller.signal });
      controller.abort();
      const { choices } = await engine.completions.create({ prompt: "z", max_tokens: 5, temperature: 0 });
      await engine.dispose();
      return choices[0]?.text;
    });
    expect(text).toBe(expectedText("z", 5));
  });

  test("a strict policy needs the worker's file alone", async () => {
    const policy = "default-src 'none'; script-src 'self'; worker-src 'self'; connect-src 'self'";
    server.intercept = (path, response) => {
      if (path !== "strict" && path !== "strict.js") return false;
      const [type, body] =
        path === "strict"
          ? ["text/html", `<!doctype html><script type="module" src="strict.js"></script>`]
          : [
              "text/javascript",
              `import * as nearfar from "/dist/index.js"; globalThis.nearfarPackage = nearfar;`,
            ];
      response.writeHead(200, { "content-type": type, "content-security-policy": policy }).end(body);
      return true;
    };
    await page.goto(new URL("strict", server.url).href);
    await page.waitForFunction(() => "nearfarPackage" in globalThis);
    const text = await page.evaluate(async () => {
      const engine = await nearfarPackage.createEngine("/toy/");
      const { choices } = await engine.completions.create({ prompt: "z", max_tokens: 5, temperature: 0 });
      await engine.dispose();
      return choices[0]?.text;
    });
    expect(text).toBe(expectedText("z", 5));
    expect(server.requests.filter((path) => path.includes("worker-source"))).toEqual([]);
  });

  test("fails what runs when it is disposed", async () => {
    const names = await page.evaluate(async () => {
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
