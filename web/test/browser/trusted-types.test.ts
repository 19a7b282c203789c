import type { Browser } from "playwright-core";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { builtPackage, distFile } from "../support/built.js";
import { CHROMIUM, openChromium } from "../support/chromium.js";
import { type StaticServer, serve } from "../support/serve.js";
import { expectedText, toyArtifact } from "../support/toy-artifact.js";
import { toyWasm } from "../support/toy-wasm.js";

const COUNT = 8;
const POLICY = "require-trusted-types-for 'script'; trusted-types nearfar";

describe.skipIf(!CHROMIUM)("a page that enforces Trusted Types", { timeout: 180_000 }, () => {
  let browser: Browser;
  beforeAll(async () => {
    await builtPackage();
    browser = await openChromium();
  }, 180_000);
  afterAll(() => browser?.close());

  async function serveTrusted(files: ReadonlyMap<string, Uint8Array>, policy: string): Promise<StaticServer> {
    const server = await serve(
      async (path) => files.get(path.replace(/^toy\//, "")) ?? (await distFile(path)),
    );
    server.intercept = (_, response) => {
      response.setHeader("content-security-policy", policy);
      response.setHeader("cross-origin-opener-policy", "same-origin");
      response.setHeader("cross-origin-embedder-policy", "require-corp");
      response.setHeader("cross-origin-resource-policy", "cross-origin");
      return false;
    };
    return server;
  }

  /** The answer of an engine on the page, with the package from `from`, and the engine's backend. */
  async function answer(server: StaticServer, from: StaticServer, prompt: string) {
    const page = await browser.newPage();
    try {
      await page.goto(server.url.href);
      // The page's policy forbids scripts given as text.
      const url = String(new URL("dist/index.js", from.url));
      await page.evaluate(`import("${url}").then((it) => { globalThis.nearfarPackage = it; })`);
      return await page.evaluate(
        async ([asked, count]) => {
          const engine = await nearfarPackage.createEngine("/toy/", { threads: 2 });
          const { choices } = await engine.completions.create({ prompt: asked, max_tokens: count });
          const { threads } = await engine.stats();
          await engine.dispose();
          return { text: choices[0]?.text, threads };
        },
        [prompt, COUNT] as const,
      );
    } finally {
      await page.close();
    }
  }

  test("has the engine's worker, by the policy `nearfar`", async () => {
    const server = await serveTrusted(toyArtifact().files, POLICY);
    const { text } = await answer(server, server, "abc").finally(() => server.close());
    expect(text).toBe(expectedText("abc", COUNT));
  });

  test("has it from another origin", async () => {
    const server = await serveTrusted(toyArtifact().files, POLICY);
    const cdn = await serveTrusted(new Map(), POLICY);
    try {
      expect((await answer(server, cdn, "abc")).text).toBe(expectedText("abc", COUNT));
      expect(cdn.requests).toContain("dist/worker.js");
    } finally {
      server.close();
      cdn.close();
    }
  });

  test("has WebAssembly's threads", async () => {
    const server = await serveTrusted((await toyWasm()).files, POLICY);
    const { text, threads } = await answer(server, server, "Hello").finally(() => server.close());
    expect(text).toBe(expectedText("Hello", COUNT));
    expect(threads).toBe(2);
  });

  test("that allows no policy of that name is told so", async () => {
    const server = await serveTrusted(
      toyArtifact().files,
      "require-trusted-types-for 'script'; trusted-types app",
    );
    await expect(answer(server, server, "abc").finally(() => server.close())).rejects.toThrow(
      /policy.*nearfar|nearfar.*policy/i,
    );
  });
});
