/** Apps built by bundlers without a server of their own, served from a folder, and run in Chromium. */

import { cp } from "node:fs/promises";
import { join } from "node:path";
import type { Browser } from "playwright-core";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { BESIDE, copyAsking, expectAnswers, PATIENCE_MS, SOURCES, serveFolder } from "../../support/apps.js";
import { type Installed, installPackage } from "../../support/built.js";
import { CHROMIUM, openChromium } from "../../support/chromium.js";
import { run, WEB } from "../../support/programs.js";
import { inTurns } from "../../support/turns.js";

/**
 * Builds the app of its folder with webpack, or Rspack, which has the same interface. Both warn of the size of
 * the grammar library, which is loaded late.
 */
const PACK = `
  const { default: pack } = await import(process.argv[1]);
  const { default: config } = await import(process.cwd() + "/webpack.config.mjs");
  const output = { ...config.output, path: process.cwd() + "/dist" };
  pack({ ...config, context: process.cwd(), output, performance: false }, (error, made) => {
    if (error) throw error;
    const { errors, warnings } = made.toJson({ all: false, errors: true, warnings: true });
    process.stdout.write(JSON.stringify({ errors, warnings }));
  });
`;

/** For each bundler, a function that builds the app of a folder into its dist/. */
const BUILDS: Record<string, (app: string) => Promise<unknown>> = {
  webpack: (app) => pack("webpack", app),
  rspack: (app) => pack("@rspack/core", app),
  rollup: (app) => node(app, "rollup/dist/bin/rollup", "-c", "--silent"),
  esbuild: (app) => run(process.execPath, ["build.mjs"], app),
  parcel: (app) => node(app, "parcel/lib/bin.js", "build", "index.html", "--no-cache", "--public-url", "./"),
};

/** The folder of web/apps that has a bundler's configuration. */
const CONFIGURATION: Record<string, string> = { rspack: "webpack" };

/** Runs the bundler in a process of its own, like its command line: here it would hold up other apps. */
async function pack(bundler: string, app: string): Promise<void> {
  const module = import.meta.resolve(bundler);
  const told = await run(process.execPath, ["--input-type=module", "--eval", PACK, module], app);
  expect(JSON.parse(told)).toEqual({ errors: [], warnings: [] });
}

function node(app: string, script: string, ...args: string[]): Promise<string> {
  return run(process.execPath, [join(WEB, "node_modules", script), ...args], app);
}

let installed: Installed;
let browser: Browser;

beforeAll(async () => {
  installed = await installPackage();
}, PATIENCE_MS);

describe.skipIf(!CHROMIUM)("an app in Chromium", BESIDE, () => {
  beforeAll(async () => {
    browser = await openChromium();
  });
  afterAll(() => browser?.close());

  // A run has the page by two of them, and the page that shares its engine by one of these.
  const two = inTurns(Object.entries(BUILDS), 2);
  const shares = inTurns(Object.keys(BUILDS));
  describe.each(two)("of %s", (bundler, build) => {
    const kinds = SOURCES.filter(({ app }) => app === "page" || shares.includes(bundler));
    test.each(kinds)("$app", async ({ app: source, sources }) => {
      const configuration = CONFIGURATION[bundler] ?? bundler;
      const app = await copyAsking(installed, `${bundler}-${source}`, ...sources, configuration);
      await build(app);
      if (bundler !== "parcel") await cp(join(app, "index.html"), join(app, "dist/index.html"));
      const server = await serveFolder(join(app, "dist"));
      const page = new URL("index.html", server.url);
      await expectAnswers(browser, page, source === "shared").finally(() => server.close());
    });
  });
});
