import type { Browser, Page } from "playwright-core";
import { afterAll, afterEach, beforeAll, beforeEach } from "vitest";
import type * as nearfar from "../../src/page/index.js";
import { builtPackage, distFile } from "./built.js";
import { openChromium } from "./chromium.js";
import { type StaticServer, serve } from "./serve.js";
import { toyArtifact } from "./toy-artifact.js";

/** Globals of a test's page: the package, as an app imports it. */
declare global {
  var nearfarPackage: typeof nearfar;
}

/** A page of Chromium with the package, beside a server of the toy artifact under /toy/, a new one for each test. */
export interface EnginePage {
  readonly page: Page;
  readonly server: StaticServer;
  /** The served artifact, which tests can change or replace. */
  artifact: ReturnType<typeof toyArtifact>;
}

/** Call this in a `describe`. The returned object is filled before each test. */
export function enginePage(): EnginePage {
  let browser: Browser;
  const at = {} as { -readonly [name in keyof EnginePage]: EnginePage[name] };

  beforeAll(async () => {
    await builtPackage();
    browser = await openChromium();
  }, 180_000);
  afterAll(() => browser?.close());

  beforeEach(async () => {
    at.artifact = toyArtifact();
    at.server = await serve(
      async (path) => at.artifact.files.get(path.replace(/^toy\//, "")) ?? (await distFile(path)),
    );
    at.page = await (await browser.newContext()).newPage();
    await at.page.goto(at.server.url.href);
    await importPackage(at.page, new URL("dist/index.js", at.server.url));
  });

  afterEach(async () => {
    await at.page.context().close();
    at.server.close();
  });
  return at;
}

/** Imports by a script of the page, because the test runner rewrites imports in functions sent to a page. */
export async function importPackage(page: Page, url: URL): Promise<void> {
  const content = `import * as nearfar from "${url}"; globalThis.nearfarPackage = nearfar;`;
  await page.evaluate(() => Reflect.deleteProperty(globalThis, "nearfarPackage"));
  await page.addScriptTag({ type: "module", content });
  await page.waitForFunction(() => "nearfarPackage" in globalThis);
}
