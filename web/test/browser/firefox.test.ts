/** WebGPU in Firefox, on a software GPU where there is no other. */

import type { Page as Playwright } from "playwright-core";
import type { Browser } from "puppeteer-core";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { builtPackage, distFile } from "../support/built.js";
import { importPackage } from "../support/engine-page.js";
import { FIREFOX, openFirefoxWithGpu } from "../support/firefox.js";
import { type StaticServer, serve } from "../support/serve.js";
import { expectedText, toyArtifact } from "../support/toy-artifact.js";

describe.skipIf(!FIREFOX)("WebGPU in Firefox", { timeout: 60_000 }, () => {
  const { files } = toyArtifact({ programs: ["one", "two"] });
  let browser: Browser;
  let server: StaticServer;

  beforeAll(async () => {
    await builtPackage();
    server = await serve(async (path) => files.get(path.replace(/^toy\//, "")) ?? (await distFile(path)));
    browser = await openFirefoxWithGpu();
  }, 180_000);
  afterAll(async () => {
    await browser?.close();
    server?.close();
  });

  test("answers, follows a format and chooses a program, without waiting for its timer of 100 ms", async () => {
    const page = await browser.newPage();
    await page.goto(server.url.href);
    // Puppeteer's page has the parts of Playwright's page that are used there.
    await importPackage(page as unknown as Playwright, new URL("dist/index.js", server.url));
    const told = await page.evaluate(async (from) => {
      // Trials of programs run on GPUs only.
      const code =
        `import "${from}"; const hide = (of, what) => Object.defineProperty(of.prototype, what, { get: () => "" });` +
        `for (const what of ["vendor", "architecture", "device", "description", "isFallbackAdapter"])` +
        `hide(GPUAdapterInfo, what);`;
      const blob = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
      const engine = await nearfarPackage.createEngine("/toy/", {
        worker: () => new Worker(blob, { type: "module", name: "nearfar" }),
      });
      const asked = { prompt: "q", max_tokens: 30, temperature: 0 };
      const free = await engine.completions.create(asked);
      const response_format = { type: "regex" as const, regex: "[0-9]{24}" };
      const format = await engine.completions.create({ ...asked, response_format });
      const { last } = await engine.stats();
      const { backend, choice } = engine.model;
      await engine.dispose();
      const texts = [free, format].map(({ choices }) => choices[0]?.text);
      return { texts, backend: backend.name, why: choice?.why, rate: last?.decodeTokensPerSecond };
    }, new URL("dist/worker.js", server.url).href);
    expect(told).toMatchObject({
      texts: [expectedText("q", 30), expect.stringMatching(/^\d{24}$/)],
      backend: "webgpu",
      // Steps that wait for the timer are too slow to be timed: there are at most ten of them a second.
      why: "timed",
      rate: expect.toSatisfy((rate) => rate > 20),
    });
  });
});
