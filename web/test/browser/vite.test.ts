import { mkdir, mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import type { Browser } from "playwright-core";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { CHROMIUM, openChromium } from "../support/chromium.js";
import { expectedTokens } from "../support/fake-backend.js";
import { builtPackage } from "../support/serve.js";
import { TOY_VOCAB, toyArtifact } from "../support/toy-artifact.js";

const WEB = fileURLToPath(new URL("../..", import.meta.url));
const COUNT = 12;

/** As the README shows it, in an app without a line of configuration. */
const APP = `
import { createEngine } from "nearfar";
const engine = await createEngine("/toy/");
const answer = { prompt: "Hello", max_tokens: ${COUNT}, temperature: 0, stream: true };
for await (const chunk of await engine.completions.create(answer))
  document.body.append(chunk.choices[0]?.text ?? "");
await engine.dispose();
document.title = "done";
`;

describe.skipIf(!CHROMIUM).each(["vite6", "vite7"])("the dev server of %s", { timeout: 120_000 }, (name) => {
  let browser: Browser;
  let app: string;

  beforeAll(async () => {
    browser = await openChromium();
    app = await mkdtemp(join(tmpdir(), "nearfar-app-"));
    const write = async (path: string, content: string | Uint8Array): Promise<void> => {
      await mkdir(dirname(join(app, path)), { recursive: true });
      await writeFile(join(app, path), content);
    };
    await write(
      "package.json",
      JSON.stringify({ name: "app", type: "module", dependencies: { nearfar: "*" } }),
    );
    await write("index.html", `<!doctype html><body><script type="module" src="/main.js"></script>`);
    await write("main.js", APP);
    for (const [path, bytes] of toyArtifact().files) await write(`public/toy/${path}`, bytes);
    // Copied as npm installs it: a linked package is not prebundled.
    await write("node_modules/nearfar/package.json", await readFile(join(WEB, "package.json")));
    for (const [path, bytes] of await builtPackage()) await write(`node_modules/nearfar/dist/${path}`, bytes);
  }, 60_000);
  afterAll(async () => {
    await browser?.close();
    await rm(app, { recursive: true, force: true });
  });

  test("finds the worker, and the page streams an answer", async () => {
    const { createServer } = (await import(name)) as typeof import("vite6");
    const server = await createServer({
      root: app,
      configFile: false,
      logLevel: "silent",
      server: { port: 0, host: "127.0.0.1" },
    });
    await server.listen();
    const page = await browser.newPage();
    try {
      const failed = new Promise<string>((resolve) =>
        page.on("pageerror", (error) => resolve(String(error))),
      );
      await page.goto(server.resolvedUrls?.local[0] ?? "");
      const done = page.waitForFunction(() => document.title === "done", null, { timeout: 90_000 });
      expect(await Promise.race([failed, done.then(() => "done")])).toBe("done");
      const ids = [..."Hello"].map((character) => character.charCodeAt(0) - 31);
      const text = expectedTokens(ids, COUNT, TOY_VOCAB).map((id) =>
        id === 96 ? "" : String.fromCharCode(id + 31),
      );
      expect(await page.evaluate(() => document.body.textContent?.trim())).toBe(text.join("").trim());
    } finally {
      await page.close();
      await server.close();
    }
  });
});
