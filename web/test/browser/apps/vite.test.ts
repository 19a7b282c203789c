/** Apps of Vite: on its development server without any configuration, and built. */

import { readdir, readFile, rm } from "node:fs/promises";
import { join } from "node:path";
import { gzipSync } from "node:zlib";
import type { Browser } from "playwright-core";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { LIMITS, MOST_FILES } from "../../../scripts/size.mjs";
import {
  answerOf,
  BESIDE,
  copyApp,
  copyAsking,
  expectAnswers,
  modelFiles,
  PATIENCE_MS,
  serveFolder,
  TEXT,
  writeFiles,
} from "../../support/apps.js";
import { type Installed, installPackage } from "../../support/built.js";
import { CHROMIUM, openChromium } from "../../support/chromium.js";
import { run, WEB } from "../../support/programs.js";
import { inTurns } from "../../support/turns.js";

/** Earlier major versions of Vite; a run tests one of them. */
const EARLIER = inTurns(["vite6", "vite7"]).map((name) => ({ name, sources: ["page"] }));

let installed: Installed;
let browser: Browser;

beforeAll(async () => {
  installed = await installPackage();
}, PATIENCE_MS);

const load = async (name: string) => (await import(name)) as typeof import("vite");

/** Builds with Vite's program, which chooses production by itself where its environment does not. */
function build(name: string, app: string): Promise<string> {
  const script = join(WEB, "node_modules", name, "bin/vite.js");
  return run(process.execPath, [script, "build", "--logLevel", "error"], app, { NODE_ENV: "" });
}

describe.skipIf(!CHROMIUM)("an app in Chromium", BESIDE, () => {
  beforeAll(async () => {
    browser = await openChromium();
  });
  afterAll(() => browser?.close());

  describe.each([
    ...EARLIER,
    { name: "vite", sources: ["page"] },
    { name: "vite", sources: ["page", "shared"] },
  ])("of $name: $sources", ({ name, sources }) => {
    const shared = sources.includes("shared");
    let app: string;
    beforeAll(async () => {
      app = await copyAsking(installed, `${name}-${sources.at(-1)}`, ...sources, "vite");
      await writeFiles(join(app, "public"), await modelFiles());
    });

    // One after the other: the development server watches the folder that the build writes to.
    test.sequential("runs on its development server, without any configuration", async () => {
      const { createServer } = await load(name);
      const server = await createServer({
        root: app,
        configFile: false,
        logLevel: "silent",
        server: { port: 0, host: "127.0.0.1" },
      });
      await server.listen();
      const url = server.resolvedUrls?.local[0] ?? "";
      await expectAnswers(browser, url, shared).finally(() => server.close());
    });

    test.sequential("runs as it is built", async () => {
      await buildAndAsk();
    });

    test.sequential("runs as it is built without any configuration", async ({ skip }) => {
      if (name !== "vite") skip("Vite 6 and 7 refuse to");
      await rm(join(app, "vite.config.js"));
      await buildAndAsk();
    });

    async function buildAndAsk(): Promise<void> {
      await build(name, app);
      const server = await serveFolder(join(app, "dist"));
      const page = new URL("index.html", server.url);
      await expectAnswers(browser, page, shared).finally(() => server.close());
    }
  });

  test("as Vite builds it fetches no more before its first answer than the package promises", async () => {
    const app = await copyApp(installed, "vite-size", "page", "vite");
    await build("vite", app);
    const server = await serveFolder(join(app, "dist"));
    const context = await browser.newContext();
    try {
      expect(await answerOf(await context.newPage(), new URL("index.html", server.url))).toBe(TEXT);
      const scripts = server.requests.filter((path) => path.endsWith(".js"));
      const sizes = await Promise.all(scripts.map((path) => readFile(join(app, "dist", path)).then(zipped)));
      const sum = sizes.reduce((all, size) => all + size, 0);
      // The allowance is for code that Vite puts into each app, and for a chunk's own frame.
      expect(sum, scripts.join(" ")).toBeLessThan(LIMITS.webgpu + LIMITS.text + 6_000);
      expect(sum).toBeGreaterThan(LIMITS.webgpu / 2);
      expect(scripts.length).toBeLessThanOrEqual(MOST_FILES + 2);
      // The worker's copy, for development servers, is in no build.
      const made = await readdir(join(app, "dist/assets"));
      expect(made.filter((name) => name.startsWith("worker-source"))).toEqual([]);
    } finally {
      await context.close();
      server.close();
    }
  });
});

function zipped(script: Buffer): number {
  return gzipSync(script, { level: 9 }).length;
}
