/** Apps without a bundler: a page of plain HTML in Chromium and Firefox, and extensions of Chromium. */

import { createHash } from "node:crypto";
import { cp, readFile } from "node:fs/promises";
import { join } from "node:path";
import { build } from "esbuild";
import type { Browser } from "playwright-core";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import {
  answerOf,
  BESIDE,
  copyApp,
  copyAsks,
  expectAnswers,
  expectAsked,
  expectTold,
  modelFiles,
  PATIENCE_MS,
  serveFolder,
  TEXT,
  toldIn,
  wasmFiles,
  writeFiles,
} from "../../support/apps.js";
import { type Installed, installPackage } from "../../support/built.js";
import { CHROMIUM, openChromium, openChromiumWith } from "../../support/chromium.js";
import { FIREFOX, openFirefox } from "../../support/firefox.js";
import { serve } from "../../support/serve.js";

let installed: Installed;
let browser: Browser;

beforeAll(async () => {
  installed = await installPackage();
}, PATIENCE_MS);

/** The page of plain HTML with the package under `at`, and with the further requests of test/asks. */
async function htmlApp(name: string, at: string): Promise<string> {
  const app = await copyApp(installed, name, "html");
  await copyAsks(app);
  const page = await readFile(join(app, "index.html"), "utf8");
  const index = "https://cdn.example/nearfar/dist/index.js";
  expect(page).toContain(`"nearfar": "${index}"`);
  const imports = [
    `"${at}dist/index.js"`,
    `"nearfar/ai-sdk": "${at}dist/ai-sdk.js"`,
    `"@ai-sdk/provider": "/ai.js"`,
  ];
  const asks = `import { ask, show } from "./asks.js"; show(ask("/parrot/"));`;
  const whole = page
    .replace(`"${index}"`, imports.join(", "))
    .replace("</html>", `<script type="module">${asks}</script></html>`);
  await writeFiles(app, [["index.html", whole]]);
  return app;
}

describe.skipIf(!CHROMIUM)("an app in Chromium", BESIDE, () => {
  beforeAll(async () => {
    browser = await openChromium();
  });
  afterAll(() => browser?.close());

  test("of plain HTML, with the package on another origin", async () => {
    const cdn = await serve((path) => readFile(join(installed.root, "node_modules", path)).catch(() => null));
    const app = await htmlApp("html", `${cdn.url}nearfar/`);
    const server = await serveFolder(app);
    try {
      await expectAnswers(browser, new URL("index.html", server.url));
      expect(cdn.requests).toContain("nearfar/dist/worker.js");
    } finally {
      server.close();
      cdn.close();
    }
  });

  test.each(["extension", "extension-background"])("that is an %s", async (name) => {
    const app = await copyApp(installed, name, name);
    await cp(join(installed.folder, "dist"), join(app, "nearfar"), { recursive: true });
    await writeFiles(app, await modelFiles());
    await addAsks(app);
    const context = await openChromiumWith(join(installed.root, `${name}-profile`), app);
    try {
      // Chromium derives the id of an unpacked extension from its path.
      const hash = createHash("sha256").update(app).digest("hex").slice(0, 32);
      const id = hash.replace(/./g, (digit) => String.fromCharCode(97 + Number.parseInt(digit, 16)));
      const page = await context.newPage();
      expect(await answerOf(page, `chrome-extension://${id}/panel.html`)).toBe(TEXT);
      await expectAsked(page);
    } finally {
      await context.close();
    }
  });
});

/** Makes an extension's panel send the requests of test/asks after its own question, with the same options. */
async function addAsks(app: string): Promise<void> {
  const panel = await readFile(join(app, "panel.js"), "utf8");
  const [, options = "undefined"] = /createEngine\("\/model\/"(?:, (\{.*?\n\}))?\);/s.exec(panel) ?? [];
  await copyAsks(app);
  const contents = `${panel}\n
    import { ask, show } from "./asks.js";
    show(ask("/parrot/", ${options}));`;
  await build({
    stdin: { contents, resolveDir: app },
    outfile: join(app, "panel.js"),
    allowOverwrite: true,
    bundle: true,
    format: "esm",
    external: ["./nearfar/index.js"],
    alias: { nearfar: "./nearfar/index.js", "nearfar/ai-sdk": join(app, "nearfar/ai-sdk.js") },
  });
}

describe.skipIf(!FIREFOX)("an app in Firefox", BESIDE, () => {
  test("of plain HTML answers through WebAssembly", async () => {
    const app = await htmlApp("firefox", "/nearfar/");
    await cp(installed.folder, join(app, "nearfar"), { recursive: true });
    const server = await serveFolder(app, await wasmFiles());
    const firefox = await openFirefox();
    try {
      const tab = await firefox.newPage();
      await tab.goto(String(new URL("index.html", server.url)));
      const said = (text: string) => document.querySelector("#answer")?.textContent === text;
      await tab.waitForFunction(said, { timeout: PATIENCE_MS - 20_000 }, TEXT);
      expectTold(await (await tab.waitForFunction(toldIn, { timeout: 120_000 })).jsonValue());
    } finally {
      await firefox.close();
      server.close();
    }
  });
});
