/** An app of Next, built by both of its bundlers: it is rendered on its server, and answers in Chromium. */

import { type ChildProcess, spawn } from "node:child_process";
import { cp, rm } from "node:fs/promises";
import { join } from "node:path";
import type { Browser } from "playwright-core";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import {
  BESIDE,
  copyApp,
  copyAsks,
  expectAnswers,
  modelFiles,
  PATIENCE_MS,
  writeFiles,
} from "../../support/apps.js";
import { type Installed, installPackage } from "../../support/built.js";
import { CHROMIUM, openChromium } from "../../support/chromium.js";
import { run, WEB } from "../../support/programs.js";
import { inTurns } from "../../support/turns.js";

const NEXT = join(WEB, "node_modules/next/dist/bin/next");
/** Each of these takes half a minute: a run tests the build, or the development server, of one bundler. */
const PLACES = inTurns(["turbopack build", "webpack dev", "webpack build", "turbopack dev"]);
const BUNDLERS = ["turbopack", "webpack"].filter((name) => PLACES.some((place) => place.startsWith(name)));
const AT = ["--port", "0", "--hostname", "127.0.0.1"];

let installed: Installed;
let browser: Browser;

beforeAll(async () => {
  installed = await installPackage();
}, PATIENCE_MS);

describe.skipIf(!CHROMIUM)("an app of Next in Chromium", BESIDE, () => {
  beforeAll(async () => {
    browser = await openChromium();
  });
  afterAll(() => browser?.close());

  describe.each(BUNDLERS)("by %s", (bundler) => {
    let app: string;
    beforeAll(async () => {
      app = await copyApp(installed, `next-${bundler}`, "next");
      await copyAsks(join(app, "app"));
      for (const file of ["page.jsx", "asks.jsx"])
        await cp(join(WEB, "test/asks", file), join(app, "app", file));
      await rm(join(app, "package-lock.json"));
      await writeFiles(join(app, "public"), await modelFiles());
    });

    // One after the other: both write to one folder.
    test.runIf(PLACES.includes(`${bundler} build`)).sequential("answers as it is built", async () => {
      await run(process.execPath, [NEXT, "build", app, `--${bundler}`], app);
      await expectAnswersOf("start", app, ...AT);
    });

    test.runIf(PLACES.includes(`${bundler} dev`)).sequential("answers as it is served", async () => {
      await expectAnswersOf("dev", app, `--${bundler}`, ...AT);
    });

    async function expectAnswersOf(...command: string[]): Promise<void> {
      const env = { ...process.env, NEXT_TELEMETRY_DISABLED: "1" };
      const server = spawn(process.execPath, [NEXT, ...command], { cwd: app, env });
      try {
        const url = await addressOf(server);
        expect(await (await fetch(url)).text()).toContain('<p id="answer"></p>');
        await expectAnswers(browser, url);
      } finally {
        server.kill();
      }
    }
  });
});

/** The address that a server prints. Its later output is read too, because writing to a closed pipe ends it. */
function addressOf({ stdout }: ChildProcess): Promise<string> {
  return new Promise((resolve, reject) => {
    let printed = "";
    stdout?.on("data", (chunk) => {
      printed += chunk;
      const url = /http:\/\/127\.0\.0\.1:\d+/.exec(printed)?.[0];
      if (url) resolve(url);
    });
    stdout?.on("end", () => reject(new Error(`the server ended: ${printed}`)));
  });
}
