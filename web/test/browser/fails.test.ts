/** How a page learns of failures in a real browser, and how it can continue. */

import type { Browser, Page } from "playwright-core";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "vitest";
import type * as nearfar from "../../src/page/index.js";
import { builtPackage, distFile } from "../support/built.js";
import { CHROMIUM, openChromium } from "../support/chromium.js";
import { expectedTokens } from "../support/fake-backend.js";
import { type StaticServer, serve } from "../support/serve.js";
import { TOY_VOCAB, toyArtifact } from "../support/toy-artifact.js";

/** The text that the toy model gives after `prompt`. */
function expectedText(prompt: string, count: number): string {
  return expectedTokens(
    [...prompt].map((character) => character.charCodeAt(0) - 31),
    count,
    TOY_VOCAB,
  )
    .map((id) => (id === 0 || id === 96 ? "" : String.fromCharCode(id + 31)))
    .join("");
}

const ASKED = { prompt: "abc", max_tokens: 20, temperature: 0 } as const;

describe.skipIf(!CHROMIUM)("an engine that fails in Chromium", { timeout: 180_000 }, () => {
  let browser: Browser;
  let server: StaticServer;
  let page: Page;
  const artifact = toyArtifact({
    chatTemplate: "{% for message in messages %}{{ message.role }}: {{ message.content }} {% endfor %}",
  });

  beforeAll(async () => {
    await builtPackage();
    browser = await openChromium();
  }, 180_000);
  afterAll(() => browser?.close());

  beforeEach(async () => {
    server = await serve(async (path) => {
      if (path.startsWith("html/")) return new TextEncoder().encode("<!doctype html><title>app</title>");
      return artifact.files.get(path.replace(/^toy\//, "")) ?? (await distFile(path));
    });
    page = await (await browser.newContext()).newPage();
    await page.goto(server.url.href);
    const script = new URL("dist/index.js", server.url);
    const content = `import * as nearfar from "${script}"; globalThis.nearfarPackage = nearfar;`;
    await page.addScriptTag({ type: "module", content });
    await page.waitForFunction(() => "nearfarPackage" in globalThis);
    await page.evaluate((from) => {
      /** The package's worker with code of the test before it, once; later workers are the package's own. */
      globalThis.workersWith =
        (...codes) =>
        () => {
          const code = `import "${from}";\n${codes.shift() ?? ""}`;
          const blob = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
          return new Worker(blob, { type: "module", name: "nearfar" });
        };
      globalThis.failureOf = async (action) => {
        try {
          await action();
        } catch (error) {
          const { name, code, message } = error as { name: string; code: string; message: string };
          return { name, code, message };
        }
        return null;
      };
    }, new URL("dist/worker.js", server.url).href);
  });

  afterEach(async () => {
    await page.context().close();
    server.close();
  });

  test("whose code cannot be had, as offline, is told by a code", async () => {
    server.intercept = (_, response) => {
      response.destroy();
      return true;
    };
    const told = await page.evaluate(async () => {
      const { createEngine, cachedModels, deleteModel, sharedEngine } = nearfarPackage;
      const calls = [createEngine, cachedModels, deleteModel, () => sharedEngine()];
      return Promise.all(calls.map((call) => failureOf(() => call("/toy/"))));
    });
    expect(told).toMatchObject([
      { code: "worker-failed", message: expect.stringMatching(/cannot be loaded.*offline.*worker\.js/) },
      ...["cachedModels", "deleteModel", "sharedEngine"].map((name) => ({
        code: "unreachable",
        message: expect.stringContaining(`The code of ${name} cannot be loaded`),
      })),
    ]);
  });

  test("behind a server that stalls goes on where it stalled; without more than headers it is unreachable", async () => {
    const ranges: (string | undefined)[] = [];
    // Two shards come at a time: one of them stalls.
    let stalls = `toy/${[...artifact.files.keys()].find((name) => name.startsWith("weights/"))}`;
    server.intercept = (path, response) => {
      const bytes = artifact.files.get(path.replace(/^toy\//, ""));
      if (!bytes || !path.startsWith(stalls) || (ranges.length > 1 && stalls !== "toy/manifest.json"))
        return false;
      const { range } = response.req.headers;
      ranges.push(range);
      const half = Math.floor(bytes.length / 2);
      // The rest of the answer never comes.
      if (!range) response.writeHead(200, { "content-length": bytes.length }).write(bytes.subarray(0, half));
      else response.writeHead(206).end(bytes.subarray(Number(/\d+/.exec(range)?.[0])));
      return true;
    };
    const load = () =>
      page.evaluate(async (asked) => {
        // Half a minute of silence is two seconds here: on a busy machine, files that come are silent for a second.
        const quick = `const { setTimeout: after } = globalThis;
          globalThis.setTimeout = (work, ms, ...given) => after(work, ms === 30000 ? 2000 : ms, ...given);`;
        const worker = workersWith(quick);
        let engine: Awaited<ReturnType<typeof nearfarPackage.createEngine>> | undefined;
        const error = await failureOf(async () => {
          engine = await nearfarPackage.createEngine("/toy/", { worker });
        });
        const answer = await engine?.completions.create(asked);
        await engine?.dispose();
        return { text: answer?.choices[0]?.text, error };
      }, ASKED);
    expect(await load()).toEqual({ text: expectedText("abc", 20), error: null });
    expect(ranges).toEqual([undefined, expect.stringMatching(/^bytes=\d+-$/)]);
    await page.evaluate(() => nearfarPackage.deleteModel("/toy/"));
    stalls = "toy/manifest.json";
    const { error } = await load();
    expect(error).toMatchObject({
      code: "unreachable",
      message: expect.stringContaining("nothing for 30 s"),
    });
  });

  test("in an endless loop is noticed, and reload takes it to life", async () => {
    const result = await page.evaluate(async (asked) => {
      const loop = `addEventListener("message", ({ data }) => { if (data.type === "generate") for (;;); });`;
      const engine = await nearfarPackage.createEngine("/toy/", { worker: workersWith(loop), patience: 4 });
      const answer = await failureOf(() => engine.completions.create(asked));
      const lost = (await engine.lost).code;
      const after = await failureOf(() => engine.completions.create(asked));
      await engine.reload();
      const again = await engine.completions.create(asked);
      await engine.dispose();
      return { answer, lost, after, text: again.choices[0]?.text };
    }, ASKED);
    expect(result.answer).toMatchObject({ name: "DeviceError", code: "worker-failed" });
    expect(result.answer?.message).toMatch(/nothing for 4 s.*engine\.reload\(\)/);
    expect(result.lost).toBe("worker-failed");
    expect(result.after?.code).toBe("worker-failed");
    expect(result.text).toBe(expectedText("abc", 20));
  });

  test("in a page that was frozen for longer than its patience is left alone", async () => {
    const asked = { ...ASKED, max_tokens: 200 };
    await page.evaluate(async () => {
      globalThis.givenEngine = await nearfarPackage.createEngine("/toy/", { patience: 4 });
    });
    await page.evaluate((request) => {
      globalThis.givenAnswer = globalThis.givenEngine.completions.create(request);
    }, asked);
    const devtools = await page.context().newCDPSession(page);
    await devtools.send("Page.setWebLifecycleState", { state: "frozen" });
    await new Promise((resolve) => setTimeout(resolve, 6000));
    await devtools.send("Page.setWebLifecycleState", { state: "active" });
    const text = await page.evaluate(async () => (await globalThis.givenAnswer).choices[0]?.text);
    expect(text).toBe(expectedText("abc", 200));
  });

  test("by a crash of its worker, is told, and goes on after reload", async () => {
    const result = await page.evaluate(async (asked) => {
      const crash =
        'addEventListener("message", ({ data }) => { if (data.type === "generate") throw Error("boom"); });';
      const engine = await nearfarPackage.createEngine("/toy/", { worker: workersWith(crash) });
      const [first] = await Promise.allSettled([engine.completions.create(asked)]);
      const lost = await engine.lost;
      await engine.reload();
      const again = await engine.completions.create(asked);
      await engine.dispose();
      return { first: first?.status, code: lost.code, message: lost.message, text: again.choices[0]?.text };
    }, ASKED);
    expect(result).toMatchObject({ code: "worker-failed", text: expectedText("abc", 20) });
    expect(result.message).toContain("boom");
  });

  test("for want of memory takes smaller steps, and the model says so", async () => {
    const prompt = "x".repeat(100);
    const result = await page.evaluate(
      async (asked) => {
        const full = `const compile = GPUDevice.prototype.createComputePipelineAsync;
          GPUDevice.prototype.createComputePipelineAsync = function (given) {
            if (given.label.endsWith("_64")) return Promise.reject(new Error("out of memory"));
            return compile.call(this, given);
          };`;
        const warnings: string[] = [];
        const onWarning = (message: string): number => warnings.push(message);
        const engine = await nearfarPackage.createEngine("/toy/", { worker: workersWith(full), onWarning });
        const before = engine.model.largestStep;
        const answer = await engine.completions.create(asked);
        const after = engine.model.largestStep;
        await engine.dispose();
        return { before, after, warnings, text: answer.choices[0]?.text };
      },
      { ...ASKED, prompt },
    );
    expect(result).toMatchObject({ before: 64, after: 16, text: expectedText(prompt, 20) });
    expect(result.warnings).toEqual([expect.stringContaining("steps of at most 16 rows")]);
  });

  test("for want of context says so by its code, and goes on without the oldest turns", async () => {
    const result = await page.evaluate(async () => {
      const engine = await nearfarPackage.createEngine("/toy/");
      const turn = [
        { role: "user", content: "x".repeat(40) },
        { role: "assistant", content: "y".repeat(40) },
      ] as const;
      const last = { role: "user", content: "and?" } as const;
      const messages = [
        { role: "system", content: "Be brief." } as const,
        ...turn,
        ...turn,
        ...turn,
        ...turn,
      ];
      const asked = { messages: [...messages, last], max_tokens: 5, temperature: 0 };
      const refused = await failureOf(() => engine.chat.completions.create(asked));
      const kept = await engine.chat.completions.create({ ...asked, context_policy: "truncate-oldest" });
      const left = kept.usage.prompt_tokens_details.left_out_messages ?? 0;
      const rest = [messages[0], ...messages.slice(1 + left), last].flatMap((message) => message ?? []);
      const same = await engine.chat.completions.create({ ...asked, messages: rest });
      await engine.dispose();
      return { refused, left, texts: [kept, same].map(({ choices }) => choices[0]?.message.content) };
    });
    expect(result.refused).toMatchObject({ name: "RequestError", code: "context-overflow" });
    expect(result.refused?.message).toContain("the model's own limit");
    expect(result.left).toBeGreaterThan(0);
    expect(result.left % 2, "whole turns").toBe(0);
    expect(result.texts[0]).toBe(result.texts[1]);
  });

  test("tells a browser without WebGPU from one without a GPU, and HTML from an artifact", async () => {
    const result = await page.evaluate(async () => {
      const load = (url: string, code = "") =>
        failureOf(() => nearfarPackage.createEngine(url, { worker: workersWith(code), backend: "webgpu" }));
      return {
        none: await load("/toy/", "navigator.gpu.constructor.prototype.requestAdapter = async () => null;"),
        missing: await load("/toy/", 'Object.defineProperty(navigator, "gpu", { value: undefined });'),
        html: await load("/html/"),
        absent: await load("/nowhere/"),
      };
    });
    expect(result.none?.code).toBe("no-adapter");
    expect(result.none?.message).not.toContain("is missing");
    expect(result.missing?.code).toBe("webgpu-missing");
    expect(result.html?.code).toBe("not-an-artifact");
    expect(result.html?.message).toContain("HTML");
    expect(result.absent?.code).toBe("not-found");
  });

  test("by a signal rejects with its reason, at load and in a stream", async () => {
    const result = await page.evaluate(async (asked) => {
      const create = (signal: AbortSignal) => nearfarPackage.createEngine("/toy/", { signal });
      const timeout = await failureOf(() => create(AbortSignal.timeout(1)));
      const controller = new AbortController();
      const engine = await create(controller.signal);
      const reason = new Error("mine");
      const stop = new AbortController();
      let same = false;
      try {
        const request = { ...asked, max_tokens: 200, stream: true, signal: stop.signal } as const;
        for await (const _ of await engine.completions.create(request)) stop.abort(reason);
      } catch (error) {
        same = error === reason;
      }
      await engine.dispose();
      const disposed = await failureOf(() => engine.completions.create(asked));
      return { timeout, same, disposed };
    }, ASKED);
    expect(result.timeout?.name).toBe("TimeoutError");
    expect(result.same).toBe(true);
    expect(result.disposed?.code).toBe("disposed");
  });
});

interface Failure {
  readonly name: string;
  readonly code: string;
  readonly message: string;
}

declare global {
  var workersWith: (...codes: string[]) => () => Worker;
  var failureOf: (action: () => Promise<unknown>) => Promise<Failure | null>;
  var givenEngine: nearfar.Engine;
  var givenAnswer: Promise<nearfar.Completion>;
  var nearfarPackage: typeof nearfar;
}
